/* Messages of one pair (host.h: "Message i of the pair"; message.c).
 *
 * Promise: mails, orders and ring places are read only when they hold what belongs to the message, and
 * while nobody writes there; chunks arrive in order; the sender does not return before the receive is
 * posted; nobody waits for ever. Messages have 0 (they travel in the mail) to 3 chunks.
 *
 * Mutations, each of which must fail: ONE_MAIL, ONE_ORDER (no second one), BUFFERED (the sender returns
 * before the receive is posted), FULL (it fills one place too many).
 */
#define MESSAGES 5
#define PLACES 2 /* 4 in the library; fewer fill sooner */
#define RUBBISH 255

#ifdef ONE_MAIL
#define MAIL(i) 0
#else
#define MAIL(i) ((i) & 1)
#endif
#ifdef ONE_ORDER
#define ORDER(i) 0
#else
#define ORDER(i) ((i) & 1)
#endif
#ifdef FULL
#define ROOM (PLACES + 1)
#else
#define ROOM PLACES
#endif

byte chunks[MESSAGES + 1]; /* what both agree on */
byte mail[2], mail_seq[2];
byte order[2], order_seq;
byte ring[PLACES], head, tail;
byte posted; /* what the receiver has begun, for the promise alone */

active proctype sender() {
    byte i, done, put;
    bool matched;
    for (i : 1 .. MESSAGES) {
        select(done : 0 .. 3);
        chunks[i] = done;
        mail[MAIL(i)] = RUBBISH;
        mail[MAIL(i)] = i;
        mail_seq[MAIL(i)] = i; /* host_publish */
        done = 0;
        matched = false;
        do
        :: done < chunks[i] && put < tail + ROOM ->
            ring[put % PLACES] = RUBBISH;
            ring[put % PLACES] = put;
            put++;
            done++;
            head = put /* host_publish */
        :: !matched && order_seq >= i ->
            assert(order[ORDER(i)] == i);
            assert(order[ORDER(i)] == i);
            matched = true
#ifdef BUFFERED
        :: done == chunks[i] -> break
#else
        :: done == chunks[i] && matched -> break
#endif
        od;
        assert(posted >= i)
    }
}

active proctype receiver() {
    byte i, done, taken;
    for (i : 1 .. MESSAGES) {
        order[ORDER(i)] = RUBBISH;
        order[ORDER(i)] = i;
        atomic { order_seq = i; posted = i }; /* host_publish */
        mail_seq[MAIL(i)] >= i;
        assert(mail[MAIL(i)] == i);
        assert(mail[MAIL(i)] == i);
        done = 0;
        do
        :: done == chunks[i] -> break
        :: done < chunks[i] && head > taken ->
            assert(ring[taken % PLACES] == taken);
            assert(ring[taken % PLACES] == taken);
            taken++;
            done++;
            tail = taken /* host_publish */
        od
    }
}
