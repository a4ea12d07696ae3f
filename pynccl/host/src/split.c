/* Splitting: the ranks of the parent gather everybody's colour and key, each works out who is in its child
 * and in which order, and the child is then created like any other communicator, under an id that the
 * child's first rank offered in the same gathering. Ranks with NCCL_SPLIT_NOCOLOR only take part in the first
 * half. No state of its own.
 */
#include <stdlib.h>
#include <sys/random.h>

#include "work.h"

int host_split_set(struct host_work *w, struct ncclComm *c, int color, int key) {
    size_t n = (size_t)c->nranks;
    struct host_wish *wishes = calloc(n + 1, sizeof *wishes);
    if (!wishes)
        return 0;
    struct host_wish *own = &wishes[n];
    own->color = color;
    own->key = key;
    if (getrandom(own->id, sizeof own->id, 0) != (ssize_t)sizeof own->id) {
        free(wishes);
        return 0;
    }
    struct host_call call = {.send = own,
        .recv = wishes,
        .count = sizeof *own,
        .nbytes = sizeof *own,
        .kind = HOST_SPLIT,
        .dtype = ncclInt8};
    host_work_set(w, HOST_WORK_SPLIT, c, &call);
    w->wishes = wishes;
    return 1;
}

/* Does rank a stand before rank b in their child? By key, then by rank in the parent. */
static int precedes(const struct host_wish *wishes, int a, int b) {
    return wishes[a].key != wishes[b].key ? wishes[a].key < wishes[b].key : a < b;
}

static int child_rank(const struct host_work *w, int r) {
    const struct host_wish *all = w->wishes;
    int rank = 0;
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
    w->child = host_comm_new();
    if (w->child)
        w->init = host_init_new(w->child, nranks, child_rank(w, me), all[first].id, parent->timeout);
    if (!w->init) {
        w->result = host_fail(ncclSystemError, "CommSplit: out of memory");
        return HOST_FAILED;
    }
    w->child->device = parent->device;
    w->child->timeout = parent->timeout;
    return HOST_MOVED;
}

enum host_step host_split_step(struct host_work *w) {
    if (w->init)
        return host_init_step(w);
    enum host_step step = host_collective_step(w);
    if (step != HOST_FINISHED || w->wishes[w->comm->rank].color == NCCL_SPLIT_NOCOLOR)
        return step;
    return create_child(w);
}
