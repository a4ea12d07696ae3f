/* Children of communicators: splits, growths and shrinks.
 *
 * Split: the ranks of the parent gather everybody's colour and key, each works out who is in its child
 * and in which order, and the child is then created like any other communicator, under an id that the
 * child's first rank offered in the same gathering. Ranks with NCCL_SPLIT_NOCOLOR only take part in the first
 * half.
 *
 * Grow: the same gathering brings the id from the rank that has it to all ranks of the parent; the new ranks
 * were given it by the program, and know nothing of a parent.
 *
 * Shrink: nothing may be gathered, since ranks of the parent may be dead and its state is what it is. The
 * survivors agree about the set that is left out, so they work out the id themselves: from the parent's id,
 * the set, and how often this set has been left out before. No state of its own.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "work.h"

#define GRACE_NS UINT64_C(500000000)

/* One rank's part in a gathering. */
static struct host_wish *set_wish(
    struct host_work *w, struct ncclComm *c, int kind, const struct host_traits *traits) {
    size_t n = (size_t)c->nranks;
    struct host_wish *wishes = calloc(n + 1, sizeof *wishes);
    if (!wishes)
        return NULL;
    struct host_wish *own = &wishes[n];
    struct host_call call = {.send = own,
        .recv = wishes,
        .count = sizeof *own,
        .nbytes = sizeof *own,
        .kind = kind,
        .dtype = ncclInt8};
    host_work_set(w, HOST_WORK_SPLIT, c, &call);
    w->wishes = wishes;
    w->traits = *traits;
    w->patience = host_init_patience();
    w->tolerant = host_observe32(&c->revoked) != 0;
    return own;
}

int host_split_set(struct host_work *w, struct ncclComm *c, int color, int key, const struct host_traits *traits) {
    struct host_wish *own = set_wish(w, c, HOST_SPLIT, traits);
    if (!own)
        return 0;
    own->color = color;
    own->key = key;
    if (getrandom(own->id, sizeof own->id, 0) == (ssize_t)sizeof own->id)
        return 1;
    free(w->wishes);
    w->wishes = NULL;
    return 0;
}

int host_grow_set(struct host_work *w, struct ncclComm *c, int nranks, const uint8_t *id,
    const struct host_traits *traits) {
    struct host_wish *own = set_wish(w, c, HOST_GROW, traits);
    if (!own)
        return 0;
    own->color = nranks;
    own->key = id != NULL;
    if (id)
        memcpy(own->id, id, sizeof own->id);
    return 1;
}

/* Does rank a stand before rank b in their child? By key, then by rank in the parent. */
static int precedes(const struct host_wish *wishes, int a, int b) {
    return wishes[a].key != wishes[b].key ? wishes[a].key < wishes[b].key : a < b;
}

static int child_rank(const struct host_work *w, int r) {
    const struct host_wish *all = w->wishes;
    int rank = 0;
    if (w->call.kind == HOST_GROW)
        return r;
    for (int p = 0; p < w->comm->nranks; p++)
        rank += all[p].color == all[r].color && precedes(all, p, r);
    return rank;
}

/* A rank that dies between the two halves leaves a child that waits for somebody whom it does not know:
 * the parent's seats tell. Nobody leaves the parent in peace while the child is incomplete. */
int host_split_missing(const struct host_work *w, int from) {
    if (!w->init)
        return host_collective_missing(w, from);
    int me = w->comm->rank;
    for (int r = from; r < w->comm->nranks; r++)
        if (r != me && w->wishes[r].color == w->wishes[me].color &&
            !host_init_here(w->init, child_rank(w, r)))
            return r;
    return -1;
}

int host_split_server(const struct host_work *w) {
    const struct host_map *map = w->comm->map;
    int me = w->comm->rank, pid = w->init ? host_init_server(w->init) : 0;
    for (int r = 0; pid && r < map->nranks; r++)
        if (r != me && host_seat(map, r)->pid == pid && w->wishes[r].color == w->wishes[me].color)
            return r;
    return -1;
}

static enum host_step begin_child(struct host_work *w, int nranks, int rank, const uint8_t id[HOST_ID]) {
    struct ncclComm *parent = w->comm;
    uint64_t patience = w->patience ? w->patience : host_peek(&parent->timeout);
    /* Who watches the parent (liveness.c) is to be first: it names ranks as the caller knows them. */
    uint64_t grace = w->call.kind == HOST_GROW ? 0 : GRACE_NS;
    w->child = host_comm_new();
    if (w->child)
        w->init = host_init_new(w->child, nranks, rank, id, patience + grace);
    if (!w->init) {
        w->result = host_fail(ncclSystemError, "%s: out of memory", HOST_ROWS[w->call.kind].name);
        return HOST_FAILED;
    }
    w->child->device = parent->device;
    host_publish(&w->child->timeout, host_peek(&parent->timeout));
    host_comm_set_traits(w->child, &w->traits);
    return HOST_MOVED;
}

/* Everybody sees the same wishes, so everybody comes to the same verdict. */
static enum host_step begin_grown(struct host_work *w) {
    const struct host_wish *all = w->wishes;
    int n = w->comm->nranks, from = -1;
    for (int r = 0; r < n; r++) {
        if (all[r].color != all[0].color) {
            w->result = host_fail(ncclInvalidUsage,
                "CommGrow: ranks disagree about the number of ranks: rank 0 says %d, rank %d says %d", all[0].color,
                r, all[r].color);
            return HOST_FAILED;
        }
        if (all[r].key && from >= 0 && memcmp(all[r].id, all[from].id, HOST_ID)) {
            w->result = host_fail(ncclInvalidUsage,
                "CommGrow: ranks %d and %d bring different unique ids; one rank gets one from ncclCommGetUniqueId",
                from, r);
            return HOST_FAILED;
        }
        if (all[r].key && from < 0)
            from = r;
    }
    if (from < 0) {
        w->result = host_fail(ncclInvalidUsage,
            "CommGrow: no rank brings a unique id; one of the existing ranks passes the one that it got from "
            "ncclCommGetUniqueId");
        return HOST_FAILED;
    }
    return begin_child(w, all[0].color, w->comm->rank, all[from].id);
}

static enum host_step create_child(struct host_work *w) {
    struct ncclComm *parent = w->comm;
    const struct host_wish *all = w->wishes;
    int me = parent->rank, first = me, nranks = 0;
    for (int r = 0; r < parent->nranks; r++) {
        if (all[r].color != all[me].color)
            continue;
        nranks++;
        if (precedes(all, r, first))
            first = r;
    }
    return begin_child(w, nranks, child_rank(w, me), all[first].id);
}

enum host_step host_split_step(struct host_work *w) {
    if (w->init)
        return host_init_step(w);
    enum host_step step = host_collective_step(w);
    if (step == HOST_FINISHED && w->call.kind == HOST_GROW)
        return begin_grown(w);
    if (step != HOST_FINISHED || w->wishes[w->comm->rank].color == NCCL_SPLIT_NOCOLOR)
        return step;
    return create_child(w);
}

/* ---- shrinking ------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t h, uint64_t value) {
    h ^= value + UINT64_C(0x9e3779b97f4a7c15) + (h << 6) + (h >> 2);
    h = (h ^ (h >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    h = (h ^ (h >> 27)) * UINT64_C(0x94d049bb133111eb);
    return h ^ (h >> 31);
}

static void digest(uint8_t out[HOST_ID], const uint8_t from[HOST_ID], const int *exclude, int n) {
    uint64_t h[2];
    memcpy(h, from, sizeof h);
    for (int half = 0; half < 2; half++) {
        h[half] = mix(h[half], (uint64_t)n);
        for (int i = 0; i < n; i++)
            h[half] = mix(h[half], (uint64_t)exclude[i]);
    }
    memcpy(out, h, sizeof h);
}

/* The id under which the survivors meet. The same set may be left out again and again, and every time the
 * meeting is another one: all survivors have left it out equally often. */
static int shrink_id(struct ncclComm *c, const int *exclude, int n, uint8_t id[HOST_ID]) {
    uint8_t set[HOST_ID];
    int before = 0;
    digest(set, host_header(c->map)->id, exclude, n);
    for (int i = 0; i < c->nshrunk; i++)
        before += memcmp(c->shrunk[i], set, HOST_ID) == 0;
    uint8_t(*more)[HOST_ID] = realloc(c->shrunk, ((size_t)c->nshrunk + 1) * sizeof *more);
    if (!more)
        return 0;
    c->shrunk = more;
    memcpy(more[c->nshrunk++], set, HOST_ID);
    digest(id, set, &before, 1);
    return 1;
}

int host_shrink_set(struct host_work *w, struct ncclComm *c, const int *exclude, int n,
    const struct host_traits *traits) {
    uint8_t id[HOST_ID];
    host_work_set(w, HOST_WORK_SHRINK, c, &(struct host_call){.kind = HOST_SPLIT});
    w->tolerant = 1;
    w->patience = host_init_patience();
    w->traits = *traits;
    w->places = calloc((size_t)c->nranks, sizeof *w->places);
    if (!w->places || !shrink_id(c, exclude, n, id)) {
        free(w->places);
        w->places = NULL;
        return 0;
    }
    for (int r = 0, i = 0; r < c->nranks; r++) {
        if (i < n && exclude[i] == r) {
            w->places[r] = -1;
            i++;
        } else {
            w->places[r] = r - i;
        }
    }
    if (begin_child(w, c->nranks - n, w->places[c->rank], id) != HOST_FAILED)
        return 1;
    if (w->child)
        host_comm_end(w->child, HOST_DESTROYED, "the failure of its creation");
    free(w->places);
    w->child = NULL;
    w->places = NULL;
    return 0;
}

int host_shrink_missing(const struct host_work *w, int from) {
    for (int r = from; r < w->comm->nranks; r++)
        if (r != w->comm->rank && w->places[r] >= 0 && !host_init_here(w->init, w->places[r]))
            return r;
    return -1;
}
