/* Collectives as state machines over the shared memory that host.h draws.
 *
 * One code for all kinds; the row of the kind says who has an input, who an output, whether blocks are
 * spread or gathered, whether values are combined. Three phases work on a piece [at, at + size) of every
 * block; B is the bytes of a block, n the ranks:
 *
 *   in    copy what others need from the send buffer to a place of mine
 *   red   combine: read all ranks' places in rank order, write my part of the result
 *   out   copy what I need from the others' places, or from the result, to the receive buffer
 *
 * One shot (small inputs): the place is the line itself (up to 48 bytes) or a slot, the piece is the whole
 * block, and every rank combines everything itself. One synchronisation: in, publish the line, wait for all
 * lines, out. Costs B in and n * B out a rank.
 *
 * Pipeline (the rest): places are stage and result, the block goes through in chunks, and a rank combines
 * 1/n of each. Step by step in(k), red(k - 1), out(k - 2), so that ranks seldom wait for each other.
 * Costs about 2 * B copied and B combined a rank. red and out wait until all lines have been compared.
 *
 * What is written where is guarded by the counters alone; see host.h for the reuse rules.
 */
#include <string.h>

#include "work.h"

enum { ARRIVE, ONE_SHOT, PIPELINE };

enum { DEPTH = 3, RESULT_BLOCK = 16 << 10, ALIGN = 64 };

static const struct host_row *row_of(const struct host_work *w) {
    return &HOST_ROWS[w->call.kind];
}

static int is_source(const struct host_work *w, int rank) {
    return !row_of(w)->from_root || rank == w->call.root;
}

static int is_sink(const struct host_work *w, int rank) {
    return !row_of(w)->to_root || rank == w->call.root;
}

static void copy(void *to, const void *from, size_t bytes) {
    if (to != from)
        memcpy(to, from, bytes);
}

/* ---- the three phases on one piece ------------------------------------------------------------------ */

/* My input of a piece to `place`. Blocks lie `stride` apart there. Own data is left out unless it has to be
 * scaled, because then it is combined from here, too. */
static void put_in(const struct host_work *w, char *place, size_t stride, size_t at, size_t size) {
    const struct host_call *call = &w->call;
    const struct host_row *row = row_of(w);
    const char *send = call->send;
    size_t esize = host_dtype_size(call->dtype);
    int me = w->u.collective.me, scale = row->reduces && host_reduce_needs_scale(call->dtype, &call->op);
    int blocks = row->spreads ? w->u.collective.nranks : 1;
    for (int b = 0; b < blocks; b++) {
        const char *from = send + (size_t)b * call->nbytes + at;
        char *to = place + (size_t)b * stride;
        if (scale)
            host_reduce_scale(call->dtype, &call->op, to, from, size / esize);
        else if (!row->spreads || b != me)
            memcpy(to, from, size);
    }
}

/* Combine [at, at + size) of every rank's input into dst. places[r] is where rank r's piece begins, which
 * is `skip` bytes into its block; my own is read from the send buffer if it needs no scaling. */
static void combine(const struct host_work *w, void *dst, const char *const *places, size_t skip, size_t at,
    size_t size) {
    const struct host_call *call = &w->call;
    const struct host_collective *c = &w->u.collective;
    const void *sources[HOST_MAX_RANKS];
    for (int r = 0; r < c->nranks; r++)
        sources[r] = places[r] + (at - skip);
    if (!host_reduce_needs_scale(call->dtype, &call->op)) {
        size_t block = row_of(w)->spreads ? (size_t)c->me * call->nbytes : 0;
        sources[c->me] = (const char *)call->send + block + at;
    }
    host_reduce(
        call->dtype, &call->op, dst, sources, c->nranks, size / host_dtype_size(call->dtype));
}

/* Copy what is mine of a piece from the sources' places to the receive buffer. */
static void take_out(const struct host_work *w, const char *const *places, size_t stride, size_t at,
    size_t size) {
    const struct host_call *call = &w->call;
    const struct host_row *row = row_of(w);
    int me = w->u.collective.me;
    char *recv = call->recv;
    for (int i = 0; i < w->u.collective.nranks; i++) {
        int r = me + i; /* own block first, then the neighbours': ranks do not all read the same one */
        if (r >= w->u.collective.nranks)
            r -= w->u.collective.nranks;
        if (!is_source(w, r))
            continue;
        const char *from = places[r] + (row->spreads ? (size_t)me * stride : 0);
        if (r == me)
            from = (const char *)call->send + (row->spreads ? (size_t)me * call->nbytes : 0) + at;
        copy(recv + (row->gathers ? (size_t)r * call->nbytes : 0) + at, from, size);
    }
}

/* ---- a communicator of one ------------------------------------------------------------------------- */

static enum host_step alone(struct host_work *w) {
    struct host_call *call = &w->call;
    if (row_of(w)->reduces && host_reduce_needs_scale(call->dtype, &call->op))
        host_reduce_scale(call->dtype, &call->op, call->recv, call->send, call->count);
    else if (call->recv != call->send)
        memmove(call->recv, call->send, call->nbytes);
    return HOST_FINISHED;
}

/* ---- arrival: publish my line, compare everybody's --------------------------------------------------- */

static int fits_one_shot(const struct host_work *w, size_t input) {
    const struct host_row *row = row_of(w);
    return input <= (row->reduces && !row->spreads ? w->comm->one_shot : (size_t)HOST_SLOT);
}

static int reserve(struct host_work *w, size_t at, size_t bytes) {
    int err = host_segment_reserve(w->comm->map, at, bytes);
    if (err)
        w->result = host_fail(ncclSystemError, "no memory for the communicator's buffers: %s", strerror(err));
    return !err;
}

static int reserve_slots(struct host_work *w) {
    struct ncclComm *comm = w->comm;
    for (uint64_t q = 0; q < 2; q++)
        if (!reserve(w, (size_t)(host_slot(comm->map, q, comm->rank) - comm->map->base), HOST_SLOT))
            return 0;
    comm->slot_ready = 1;
    return 1;
}

static enum host_step begin_pipeline(struct host_work *w) {
    struct ncclComm *comm = w->comm;
    struct host_collective *c = &w->u.collective;
    size_t place = HOST_CHUNK;
    c->piece = row_of(w)->spreads ? place / (size_t)c->nranks / ALIGN * ALIGN : place;
    c->chunks = (w->call.nbytes + c->piece - 1) / c->piece;
    c->base = comm->chunk;
    comm->chunk += c->chunks;
    c->in = c->red = c->out = 0;
    c->at_in = c->at_red = c->at_out = 0;
    if (!comm->stage_ready) {
        const struct host_map *m = comm->map;
        if (!reserve(w, (size_t)(host_stage(m, c->me, 0) - m->base), HOST_PLACES * HOST_CHUNK))
            return HOST_FAILED;
        if (c->me == 0 && !reserve(w, m->at.result, HOST_PLACES * HOST_CHUNK))
            return HOST_FAILED;
        comm->stage_ready = 1;
    }
    return HOST_MOVED;
}

/* Writes the line of this call. From here on the peers count on this rank. */
static enum host_step begin(struct host_work *w) {
    struct ncclComm *comm = w->comm;
    struct host_collective *c = &w->u.collective;
    struct host_call *call = &w->call;
    if (call->scalar)
        memcpy(call->op.scalar, call->scalar, host_dtype_size(call->dtype));
    c->me = comm->rank;
    c->nranks = comm->nranks;
    if (w->tolerant) {
        c->seq = HOST_COUNCIL | ++comm->councils;
    } else {
        c->seq = host_peek(&comm->seq) + 1;
        host_publish(&comm->seq, c->seq);
    }
    c->phase = ARRIVE;
    c->arrived = c->differs = 0;
    if (c->nranks == 1)
        return alone(w);
    c->print = host_call_print(call);
    size_t input = row_of(w)->spreads ? call->nbytes * (size_t)c->nranks : call->nbytes;
    c->one_shot = fits_one_shot(w, input);
    struct host_line *line = host_line(comm->map, c->seq, c->me);
    if (!c->one_shot) {
        if (begin_pipeline(w) == HOST_FAILED)
            return HOST_FAILED;
    } else if (is_source(w, c->me)) {
        char *place = (char *)line->data;
        if (input > HOST_INLINE) {
            if (!comm->slot_ready && !reserve_slots(w))
                return HOST_FAILED;
            place = host_slot(comm->map, c->seq, c->me);
        }
        put_in(w, place, call->nbytes, 0, call->nbytes);
    }
    line->print = c->print;
    host_publish(&line->seq, c->seq);
    return HOST_MOVED;
}

/* Look at the lines that have not been seen yet. */
static enum host_step arrive(struct host_work *w) {
    struct host_collective *c = &w->u.collective;
    int before = c->arrived;
    for (; c->arrived < c->nranks; c->arrived++) {
        struct host_line *line = host_line(w->comm->map, c->seq, c->arrived);
        if (host_observe(&line->seq) < c->seq)
            return c->arrived > before ? HOST_MOVED : HOST_STALLED;
        c->differs |= line->print != c->print;
    }
    return HOST_FINISHED;
}

/* Who called what, ranks with the same call together. */
static enum host_step disagree(struct host_work *w) {
    const struct host_collective *c = &w->u.collective;
    const struct host_map *m = w->comm->map;
    char buffer[HOST_TEXT];
    struct host_text t = {buffer, sizeof buffer, 0};
    host_text_add(&t, "%s #%llu: ", HOST_ROWS[host_print_kind(host_line(m, c->seq, 0)->print)].name,
        (unsigned long long)(c->seq & ~HOST_COUNCIL));
    for (int r = 0, said = 0; r < c->nranks; r++) {
        uint64_t print = host_line(m, c->seq, r)->print;
        int first = 0, same = 0;
        while (host_line(m, c->seq, first)->print != print)
            first++;
        if (first < r)
            continue;
        for (int p = r; p < c->nranks; p++)
            same += host_line(m, c->seq, p)->print == print;
        host_text_add(&t, "%srank%s ", said++ ? ", " : "", same > 1 ? "s" : "");
        for (int p = r, listed = 0; p < c->nranks; p++)
            if (host_line(m, c->seq, p)->print == print && listed++ < 8)
                host_text_add(&t, "%s%d", listed > 1 ? " " : "", p);
        host_text_add(&t, "%s called ", same > 8 ? " ..." : "");
        host_print_text(&t, print);
    }
    host_text_add(&t, "; every rank must make the same collective calls in the same order");
    w->result = host_fail(ncclInvalidUsage, "%s", buffer);
    return HOST_FAILED;
}

/* ---- one shot ------------------------------------------------------------------------------------- */

static enum host_step one_shot(struct host_work *w) {
    const struct host_collective *c = &w->u.collective;
    const struct host_call *call = &w->call;
    const struct host_row *row = row_of(w);
    if (!is_sink(w, c->me))
        return HOST_FINISHED;
    size_t input = row->spreads ? call->nbytes * (size_t)c->nranks : call->nbytes;
    const char *places[HOST_MAX_RANKS];
    for (int r = 0; r < c->nranks; r++)
        places[r] = input <= HOST_INLINE ? (const char *)host_line(w->comm->map, c->seq, r)->data
                                         : host_slot(w->comm->map, c->seq, r);
    if (!row->reduces) {
        take_out(w, places, call->nbytes, 0, call->nbytes);
        return HOST_FINISHED;
    }
    if (row->spreads)
        for (int r = 0; r < c->nranks; r++)
            places[r] += (size_t)c->me * call->nbytes;
    combine(w, call->recv, places, 0, 0, call->nbytes);
    return HOST_FINISHED;
}

/* ---- pipeline ------------------------------------------------------------------------------------- */

struct piece {
    uint64_t chunk; /* its number in the communicator's life */
    size_t at, size;
};

static struct piece piece_of(const struct host_work *w, uint64_t k) {
    const struct host_collective *c = &w->u.collective;
    struct piece p = {c->base + k, k * c->piece, c->piece};
    if (p.size > w->call.nbytes - p.at)
        p.size = w->call.nbytes - p.at;
    return p;
}

/* The part of a piece that rank r combines. */
static struct piece part_of(const struct host_work *w, struct piece p, int r) {
    size_t n = (size_t)w->u.collective.nranks;
    size_t each = ((p.size + n - 1) / n + ALIGN - 1) / ALIGN * ALIGN;
    size_t first = each * (size_t)r < p.size ? each * (size_t)r : p.size;
    size_t size = p.size - first < each ? p.size - first : each;
    return (struct piece){p.chunk, p.at + first, size};
}

enum gear { GEAR_IN, GEAR_RED, GEAR_OUT };

static host_u64 *gear_of(const struct host_work *w, int rank, enum gear which) {
    struct host_gear *g = host_gear(w->comm->map, rank);
    return which == GEAR_IN ? &g->in : which == GEAR_RED ? &g->red : &g->out;
}

/* Have all peers (or only the sources among them) reached `count`? *from keeps the place between looks. */
static int all_reached(const struct host_work *w, enum gear which, uint64_t count, int sources, int *from) {
    const struct host_collective *c = &w->u.collective;
    for (; *from < c->nranks; ++*from)
        if (*from != c->me && (!sources || is_source(w, *from)) &&
            host_observe(gear_of(w, *from, which)) < count)
            return 0;
    *from = 0;
    return 1;
}

/* Does anybody read my stage? */
static int feeds(const struct host_work *w) {
    const struct host_row *row = row_of(w);
    int me = w->u.collective.me;
    return is_source(w, me) && !(row->to_root && !row->reduces && me == w->call.root);
}

static int may_move_in(const struct host_work *w) {
    const struct host_collective *c = &w->u.collective;
    return c->in < c->chunks && c->in < c->out + DEPTH;
}

static int move_in(struct host_work *w) {
    struct host_collective *c = &w->u.collective;
    const struct host_row *row = row_of(w);
    if (!may_move_in(w))
        return 0;
    if (feeds(w)) {
        struct piece p = piece_of(w, c->in);
        if (p.chunk >= HOST_PLACES &&
            !all_reached(w, GEAR_OUT, p.chunk - HOST_PLACES + 1, 0, &c->at_in))
            return 0;
        char *place = host_stage(w->comm->map, c->me, p.chunk);
        if (!row->reduces || row->spreads || host_reduce_needs_scale(w->call.dtype, &w->call.op)) {
            put_in(w, place, c->piece, p.at, p.size);
        } else { /* everything but the part that I combine myself */
            struct piece own = part_of(w, p, c->me);
            const char *send = w->call.send;
            size_t before = own.at - p.at, after = p.size - before - own.size;
            memcpy(place, send + p.at, before);
            memcpy(place + before + own.size, send + own.at + own.size, after);
        }
    }
    host_publish(gear_of(w, c->me, GEAR_IN), c->base + ++c->in);
    return 1;
}

static void stages(const struct host_work *w, uint64_t chunk, size_t skip, const char **places) {
    for (int r = 0; r < w->u.collective.nranks; r++)
        places[r] = host_stage(w->comm->map, r, chunk) + skip;
}

static int move_red(struct host_work *w) {
    struct host_collective *c = &w->u.collective;
    if (c->red == c->in)
        return 0;
    if (!row_of(w)->reduces) {
        c->red = c->in;
        return 1;
    }
    struct piece p = piece_of(w, c->red);
    if (!all_reached(w, GEAR_IN, p.chunk + 1, 0, &c->at_red))
        return 0;
    const char *places[HOST_MAX_RANKS];
    char *recv = w->call.recv;
    if (row_of(w)->spreads) {
        stages(w, p.chunk, (size_t)c->me * c->piece, places);
        combine(w, recv + p.at, places, p.at, p.at, p.size);
    } else {
        struct piece own = part_of(w, p, c->me);
        stages(w, p.chunk, 0, places);
        char *result = host_result(w->comm->map, p.chunk) + (own.at - p.at);
        /* In blocks that stay in the first-level cache between the two writes. */
        for (size_t o = 0; o < own.size; o += RESULT_BLOCK) {
            size_t size = own.size - o < RESULT_BLOCK ? own.size - o : RESULT_BLOCK;
            combine(w, result + o, places, p.at, own.at + o, size);
            if (is_sink(w, c->me))
                memcpy(recv + own.at + o, result + o, size);
        }
    }
    host_publish(gear_of(w, c->me, GEAR_RED), c->base + ++c->red);
    return 1;
}

static int move_out(struct host_work *w) {
    struct host_collective *c = &w->u.collective;
    const struct host_row *row = row_of(w);
    if (c->out == c->red)
        return 0;
    struct piece p = piece_of(w, c->out);
    if (is_sink(w, c->me) && !(row->reduces && row->spreads)) {
        if (!all_reached(w, row->reduces ? GEAR_RED : GEAR_IN, p.chunk + 1, 1, &c->at_out))
            return 0;
        if (row->reduces) {
            char *recv = w->call.recv;
            const char *result = host_result(w->comm->map, p.chunk);
            struct piece own = part_of(w, p, c->me);
            size_t before = own.at - p.at, after = p.size - before - own.size;
            memcpy(recv + p.at, result, before);
            memcpy(recv + own.at + own.size, result + before + own.size, after);
        } else {
            const char *places[HOST_MAX_RANKS];
            stages(w, p.chunk, 0, places);
            take_out(w, places, c->piece, p.at, p.size);
        }
    }
    host_publish(gear_of(w, c->me, GEAR_OUT), c->base + ++c->out);
    return 1;
}

/* ---- the machine ---------------------------------------------------------------------------------- */

enum host_step host_collective_step(struct host_work *w) {
    struct host_collective *c = &w->u.collective;
    enum host_step step = HOST_STALLED;
    if (c->seq == 0 && (step = begin(w)) != HOST_MOVED)
        return step;
    if (c->phase == ARRIVE) {
        if (!c->one_shot && move_in(w))
            step = HOST_MOVED;
        enum host_step a = arrive(w);
        if (a != HOST_FINISHED)
            return a == HOST_MOVED ? a : step;
        if (c->differs)
            return disagree(w);
        c->phase = c->one_shot ? ONE_SHOT : PIPELINE;
    }
    if (c->phase == ONE_SHOT)
        return one_shot(w);
    int moved = move_in(w);
    moved |= move_red(w);
    moved |= move_out(w);
    return c->out == c->chunks ? HOST_FINISHED : moved ? HOST_MOVED : step;
}

int host_collective_missing(const struct host_work *w, int from) {
    const struct host_collective *c = &w->u.collective;
    for (int r = from; r < c->nranks && c->seq; r++) {
        if (r == c->me)
            continue;
        if (c->phase == ARRIVE) {
            if (host_observe(&host_line(w->comm->map, c->seq, r)->seq) < c->seq)
                return r;
            continue;
        }
        uint64_t in = c->base + c->in, red = c->base + c->red, out = c->base + c->out;
        if (may_move_in(w) && feeds(w) && in >= HOST_PLACES &&
            host_observe(gear_of(w, r, GEAR_OUT)) < in - HOST_PLACES + 1)
            return r;
        if (row_of(w)->reduces && c->red < c->in && host_observe(gear_of(w, r, GEAR_IN)) < red + 1)
            return r;
        if (c->out < c->red && is_sink(w, c->me) && is_source(w, r) &&
            host_observe(gear_of(w, r, row_of(w)->reduces ? GEAR_RED : GEAR_IN)) < out + 1)
            return r;
    }
    return -1;
}
