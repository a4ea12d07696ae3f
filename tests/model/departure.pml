/* A peer leaves while it is waited for (liveness.c).
 *
 * Promise: a rank that published what is needed and left then fails nobody; one that left without it fails
 * whoever needs it, at once. The waiting rank sees counters late: a look finds any value between the last
 * one seen and the present one, unless an acquire of something stored later has carried it along.
 *
 * Mutations, each of which must fail: TRUSTING (no second look after the peer was seen to have left),
 * RELAXED (the state is stored and read without order, so the second look may still be a late one).
 */
bool published, left; /* the peer's words */
bool will_publish;

active proctype peer() {
    if
    :: will_publish = true; published = true
    :: true
    fi;
    left = true
}

active proctype waiting() {
    bool seen, gone;
    do
    :: if /* a late look */
       :: published -> seen = true
       :: true
       fi;
       if
       :: seen -> break
       :: else
       fi;
       gone = left;
       if
       :: gone ->
#ifndef TRUSTING
           if
           :: published -> seen = true
#ifdef RELAXED
           :: true
#endif
           :: !published
           fi;
#endif
           break
       :: else
       fi
    od;
    assert(seen || gone);
    assert(seen == will_publish)
}
