/* Lines and slots of small collectives (host.h: "Collective q").
 *
 * Promise: whoever reads a slot finds the data of its own collective, complete, while nobody writes there;
 * every rank comes to the same verdict about a disagreement; nobody waits for ever.
 *
 * Writing takes two steps, the first leaves rubbish; reading looks twice. So a read and a write that can
 * overlap are found, in whatever order. A rank that sees a counter late only waits longer: interleavings
 * are enough, since every shared word has one writer and every wait is for a counter that only grows.
 *
 * Mutations, each of which must fail: ONE_PLACE (no second slot), EARLY (published before it is written),
 * HASTY (one rank fewer is waited for).
 */
#ifndef N
#define N 3
#endif
#ifndef CALLS
#define CALLS 4
#endif
#define RUBBISH 255

#ifdef ONE_PLACE
#define PLACE(q) 0
#else
#define PLACE(q) ((q) & 1)
#endif
#ifdef HASTY
#define AWAITED (N - 1)
#else
#define AWAITED N
#endif

typedef ranks { byte by[N] };
ranks slot[2];  /* the data: the number of the collective it belongs to */
ranks print[2]; /* fingerprints */
ranks seq[2];   /* of the lines */
byte verdict = RUBBISH; /* of the last collective, the first rank's */

proctype rank(byte me) {
    byte q, r, seen, mine, differs;
    for (q : 1 .. CALLS) {
        mine = 0;
        if /* the last call may be another one */
        :: q == CALLS -> mine = 1
        :: true
        fi;
#ifdef EARLY
        seq[PLACE(q)].by[me] = q;
#endif
        slot[PLACE(q)].by[me] = RUBBISH;
        slot[PLACE(q)].by[me] = q;
        print[PLACE(q)].by[me] = mine;
#ifndef EARLY
        seq[PLACE(q)].by[me] = q; /* host_publish */
#endif
        differs = 0;
        for (r : 0 .. AWAITED - 1) {
            seq[PLACE(q)].by[r] >= q; /* host_observe, until it is there */
            if
            :: print[PLACE(q)].by[r] != mine -> differs = 1
            :: else
            fi
        }
        for (r : 0 .. N - 1) {
            seen = slot[PLACE(q)].by[r];
            assert(seen == q);
            assert(slot[PLACE(q)].by[r] == seen)
        }
    }
    atomic {
        if
        :: verdict == RUBBISH -> verdict = differs
        :: else -> assert(verdict == differs)
        fi
    }
}

init {
    byte r;
    atomic {
        for (r : 0 .. N - 1) {
            run rank(r)
        }
    }
}
