/* Send and Recv as state machines over the pair that host.h draws.
 *
 * Both sides announce the message (the sender in its mail, the receiver in its order), both compare the
 * sizes as soon as they see the other's announcement, and no receive buffer is written before. Up to 48
 * bytes travel in the mail. The rest goes through the pair's ring: the sender fills places ahead of the
 * receiver, so the data is usually there when the receive is posted; but the sender is not done before it
 * has seen the receive posted, so a program that only works with buffered sends is caught.
 *
 * Costs two copies and one cache line each way. Messages of a pair go in the order of issue; the loop does
 * not start one before the previous of its side is done.
 */
#include <string.h>

#include "work.h"

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static int mailed(const struct host_work *w) {
    return w->call.nbytes <= HOST_INLINE;
}

static enum host_step mismatch(struct host_work *w, int sends) {
    const struct host_message *m = &w->u.message;
    char buffer[HOST_TEXT];
    struct host_text t = {buffer, sizeof buffer, 0};
    int from = sends ? w->comm->rank : w->call.root, to = sends ? w->call.root : w->comm->rank;
    host_text_add(&t, "message #%llu from rank %d to rank %d: rank %d called ",
        (unsigned long long)m->number, from, to, from);
    host_message_text(&t, sends ? m->print : m->peer_print, 1);
    host_text_add(&t, ", rank %d called ", to);
    host_message_text(&t, sends ? m->peer_print : m->print, 0);
    host_text_add(&t, "; a send and its receive must be of equal size");
    w->result = host_fail(ncclInvalidUsage, "%s", buffer);
    return HOST_FAILED;
}

/* Look for the peer's announcement; 1 once it has been seen and agrees, -1 if it does not. */
static int match(struct host_work *w, host_u64 *seq, const uint64_t *desc) {
    struct host_message *m = &w->u.message;
    if (m->matched)
        return 1;
    if (host_observe(seq) < m->number)
        return 0;
    m->peer_print = *desc;
    if (host_message_bytes(m->peer_print) != w->call.nbytes)
        return -1;
    m->matched = 1;
    return 1;
}

/* ---- send ------------------------------------------------------------------------------------------ */

static int fill(struct host_work *w, struct host_pair *pair, struct host_peer *peer) {
    const struct host_map *map = w->comm->map;
    struct host_message *m = &w->u.message;
    size_t chunk = map->at.ring_chunk, at = host_ring_at(map, w->comm->rank, w->call.root);
    int moved = 0;
    while (m->done < w->call.nbytes && peer->put < host_observe(&pair->tail) + HOST_PLACES) {
        size_t size = smaller(chunk, w->call.nbytes - m->done);
        char *place = map->base + at + peer->put % HOST_PLACES * chunk;
        memcpy(place, (const char *)w->call.send + m->done, size);
        m->done += size;
        host_publish(&pair->head, ++peer->put);
        moved = 1;
    }
    return moved;
}

static enum host_step begin_send(struct host_work *w, struct host_pair *pair, struct host_peer *peer) {
    struct host_message *m = &w->u.message;
    struct host_map *map = w->comm->map;
    if (!mailed(w) && !peer->send_ready) {
        int err = host_segment_reserve(map, host_ring_at(map, w->comm->rank, w->call.root),
            HOST_PLACES * map->at.ring_chunk);
        if (err) {
            w->result = host_fail(
                ncclSystemError, "no memory for a message ring: %s", strerror(err));
            return HOST_FAILED;
        }
        peer->send_ready = 1;
    }
    m->begun = 1;
    m->number = ++peer->sent;
    m->print = host_call_print(&w->call);
    struct host_mail *mail = &pair->mail[m->number & 1];
    mail->desc = m->print;
    if (mailed(w)) {
        if (w->call.nbytes)
            memcpy(mail->data, w->call.send, w->call.nbytes);
        m->done = w->call.nbytes;
    }
    host_publish(&mail->seq, m->number);
    return HOST_MOVED;
}

enum host_step host_send_step(struct host_work *w) {
    struct host_message *m = &w->u.message;
    struct host_peer *peer = &w->comm->peers[w->call.root];
    struct host_pair *pair = host_pair(w->comm->map, w->comm->rank, w->call.root);
    enum host_step step = HOST_STALLED;
    if (!m->begun && (step = begin_send(w, pair, peer)) == HOST_FAILED)
        return step;
    if (fill(w, pair, peer))
        step = HOST_MOVED;
    int matched = match(w, &pair->order.seq, &pair->order.desc[m->number & 1]);
    if (matched < 0)
        return mismatch(w, 1);
    return matched && m->done == w->call.nbytes ? HOST_FINISHED : step;
}

/* ---- receive --------------------------------------------------------------------------------------- */

static int drain(struct host_work *w, struct host_pair *pair, struct host_peer *peer) {
    const struct host_map *map = w->comm->map;
    struct host_message *m = &w->u.message;
    size_t chunk = map->at.ring_chunk, at = host_ring_at(map, w->call.root, w->comm->rank);
    int moved = 0;
    while (m->done < w->call.nbytes && host_observe(&pair->head) > peer->taken) {
        size_t size = smaller(chunk, w->call.nbytes - m->done);
        const char *place = map->base + at + peer->taken % HOST_PLACES * chunk;
        memcpy((char *)w->call.recv + m->done, place, size);
        m->done += size;
        host_publish(&pair->tail, ++peer->taken);
        moved = 1;
    }
    return moved;
}

enum host_step host_recv_step(struct host_work *w) {
    struct host_message *m = &w->u.message;
    struct host_peer *peer = &w->comm->peers[w->call.root];
    struct host_pair *pair = host_pair(w->comm->map, w->call.root, w->comm->rank);
    enum host_step step = HOST_STALLED;
    if (!m->begun) {
        m->begun = 1;
        m->number = ++peer->received;
        m->print = host_call_print(&w->call);
        pair->order.desc[m->number & 1] = m->print;
        host_publish(&pair->order.seq, m->number);
        step = HOST_MOVED;
    }
    struct host_mail *mail = &pair->mail[m->number & 1];
    int matched = match(w, &mail->seq, &mail->desc);
    if (matched < 0)
        return mismatch(w, 0);
    if (!matched)
        return step;
    if (mailed(w)) {
        if (w->call.nbytes)
            memcpy(w->call.recv, mail->data, w->call.nbytes);
        return HOST_FINISHED;
    }
    if (drain(w, pair, peer))
        step = HOST_MOVED;
    return m->done == w->call.nbytes ? HOST_FINISHED : step;
}

int host_message_missing(const struct host_work *w, int from) {
    /* A stalled message always waits for its peer. But the peer may have left with everything published;
     * then a step would not have stalled, so the question is asked of the words again. */
    const struct host_message *m = &w->u.message;
    int peer = w->call.root, me = w->comm->rank;
    if (from > peer || !m->begun)
        return -1;
    if (w->type == HOST_WORK_RECV) {
        struct host_pair *pair = host_pair(w->comm->map, peer, me);
        if (!m->matched && host_observe(&pair->mail[m->number & 1].seq) >= m->number)
            return -1;
        if (m->matched && host_observe(&pair->head) > w->comm->peers[peer].taken)
            return -1;
        return peer;
    }
    struct host_pair *pair = host_pair(w->comm->map, me, peer);
    if (!m->matched && host_observe(&pair->order.seq) >= m->number)
        return -1;
    if (m->done < w->call.nbytes && w->comm->peers[peer].put < host_observe(&pair->tail) + HOST_PLACES)
        return -1;
    return m->matched && m->done == w->call.nbytes ? -1 : peer;
}
