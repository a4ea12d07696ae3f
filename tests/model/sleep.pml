/* The bell (sync.c): arm, look once more, sleep; publish, look for sleepers, ring.
 *
 * Promise: the sleeper comes to see what was published. The publisher's store may stay in its store buffer
 * while it looks for sleepers, so a ring can be lost; then the bound of each sleep (BOUND) ends it.
 *
 * Without BOUND the lost ring must show as a deadlock, and without BOUND but with FENCE (the publisher's
 * store is seen by all before it looks) there must be none: the bound is needed for the missing fence, and
 * for nothing else. Mutation that must fail in spite of FENCE: BLIND (no last look after arming).
 */
bool published;          /* as the others see it */
bool sleepers, rung;
bool buffered;           /* the publisher's store is on its way */

active proctype store_buffer() {
    buffered -> published = true
}

active proctype publisher() {
    buffered = true;
#ifdef FENCE
    published;
#endif
    if
    :: sleepers -> rung = true
    :: else
    fi
}

active proctype sleeper() {
    do
    :: published -> break
    :: else ->
        rung = false; /* the value of the bell is noted, */
        sleepers = true; /* and the sleep announced: a fence */
#ifndef BLIND
        if
        :: published -> break
        :: else
        fi;
#endif
        if
        :: rung
#ifdef BOUND
        :: true /* the time is up */
#endif
        fi;
        sleepers = false
    od
}
