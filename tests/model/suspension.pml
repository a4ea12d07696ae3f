/* Giving the buffers back (api_memory.c: ncclCommSuspend, ncclCommResume).
 *
 * Promise: the pages go only while no rank is inside a call, and nobody waits for ever. A look at all ranks is
 * not one step: others suspend and resume in between.
 *
 * Mutations, each of which must fail: ONCE (no second look behind the lock), IMPATIENT (who resumes does not
 * wait for a release under way), UNTOLD (who resumes waits first and tells afterwards).
 */
#ifndef N
#define N 3
#endif
#ifndef TURNS
#define TURNS 2
#endif

bool suspended[N], calling[N];
bool releasing, removing;

inline look() {
    all = true;
    for (r : 0 .. N - 1) {
        if
        :: !suspended[r] -> all = false
        :: else
        fi
    }
}

proctype rank(byte me) {
    byte turn, r;
    bool all;
    for (turn : 1 .. TURNS) {
        calling[me] = true;
        assert(!removing);
        calling[me] = false;
        /* ncclCommSuspend */
        suspended[me] = true;
        look();
        if
        :: all ->
            if
            :: atomic { !releasing -> releasing = true }; /* host_claim32 */
#ifndef ONCE
                look();
#endif
                if
                :: all ->
                    removing = true;
                    for (r : 0 .. N - 1) {
                        assert(!calling[r])
                    }
                    removing = false
                :: else
                fi;
                releasing = false
            :: releasing
            fi
        :: else
        fi;
        /* ncclCommResume */
#ifdef UNTOLD
        !releasing;
        suspended[me] = false
#else
        suspended[me] = false;
#ifndef IMPATIENT
        !releasing
#endif
#endif
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
