/* The pipeline of large collectives (host.h: "Larger collectives"; collective.c).
 *
 * Promise: a place of the stage or of the result is read only while it holds the chunk that is wanted and
 * nobody writes there, although each rank moves in, combines and moves out at its own pace; nobody waits
 * for ever. COPY: the kinds that combine nothing and read the stages themselves. ROOTED: only rank 0 takes
 * results.
 *
 * Mutations, each of which must fail: SHORT (with COPY or ROOTED: a place is taken again one chunk too
 * soon; elsewhere DEPTH alone keeps the ranks close enough), EARLY (a counter is stored before its data),
 * BLIND (moving out does not wait for the others), HASTY (combining does not).
 */
#ifndef N
#define N 2
#endif
#ifndef CHUNKS
#define CHUNKS 7
#endif
#ifndef PLACES
#define PLACES 4
#endif
#define DEPTH (PLACES - 1)
#define RUBBISH 255

#ifdef SHORT
#define REUSE (PLACES + 1)
#else
#define REUSE PLACES
#endif

#ifdef ROOTED
#define TAKES (me == 0)
#else
#define TAKES true
#endif

byte put[N], red[N], out[N]; /* the gears; `put` is `in` there, a word of this language */
byte stage[N * PLACES];
byte result[N * PLACES]; /* a rank's part of each */

#if N == 2
#define OTHERS(word, count) ((me == 0 || word[0] >= count) && (me == 1 || word[1] >= count))
#else
#define OTHERS(word, count) ((me == 0 || word[0] >= count) && (me == 1 || word[1] >= count) && \
                             (me == 2 || word[2] >= count))
#endif
#define AT(r, k) (r) * PLACES + (k) % PLACES

#define LOOK(array, k) \
    for (r : 0 .. N - 1) { \
        if \
        :: r != me -> \
            assert(array[AT(r, k)] == k); \
            assert(array[AT(r, k)] == k) \
        :: else \
        fi \
    } \
    r = 0

#ifdef EARLY
#define FILL(array, k, counter) counter[me] = k + 1; array[AT(me, k)] = RUBBISH; array[AT(me, k)] = k
#else
#define FILL(array, k, counter) array[AT(me, k)] = RUBBISH; array[AT(me, k)] = k; counter[me] = k + 1
#endif

proctype rank(byte me) {
    byte in_, combined, gone, r;
    do
    :: gone == CHUNKS -> break
    :: in_ < CHUNKS && in_ < gone + DEPTH && (in_ < REUSE || OTHERS(out, in_ + 1 - REUSE)) ->
        FILL(stage, in_, put);
        in_++
#ifdef COPY
    :: combined < in_ -> combined = in_
#ifdef BLIND
    :: gone < combined ->
#else
    :: gone < combined && (!TAKES || OTHERS(put, gone + 1)) ->
#endif
        if
        :: TAKES -> LOOK(stage, gone)
        :: else
        fi;
#else
#ifdef HASTY
    :: combined < in_ ->
#else
    :: combined < in_ && OTHERS(put, combined + 1) ->
#endif
        LOOK(stage, combined);
        FILL(result, combined, red);
        combined++
#ifdef BLIND
    :: gone < combined ->
#else
    :: gone < combined && (!TAKES || OTHERS(red, gone + 1)) ->
#endif
        if
        :: TAKES -> LOOK(result, gone)
        :: else
        fi;
#endif
        gone++;
        out[me] = gone /* host_publish */
    od
}

init {
    byte r;
    atomic {
        for (r : 0 .. N - 1) {
            run rank(r)
        }
    }
}
