/* Windows: the registry, and the registration as a state machine.
 *
 *     OFFER     all ranks tell how large their part is and where, through the ordinary collective machinery;
 *               if somebody's memory is not ncclMemAlloc's, that is all, and every rank has NULL
 *     EXCHANGE  descriptors go to and come from the ranks of other processes (fdpass.c), and are mapped; ranks
 *               of this process are looked at where they are
 *     CONFIRM   one more meeting: either every rank has the window or nobody
 *
 * A registration is a collective among collectives: it counts in their sequence, and calls that do not agree are
 * found by their fingerprints. A rank that fails in the middle has failed for good, and its seat tells the others,
 * who miss either its descriptor or its confirmation.
 *
 * A handle is a number that was never given before. It is looked up in its communicator and never followed. A
 * window ends locally, as in NCCL: views of it that other ranks have stay good memory, but nobody looks there.
 *
 * State: the windows of each communicator (`windows`), under host_lock, since a check may come from any thread;
 * what they point to belongs to whoever is inside the communicator.
 */
#include "window.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fdpass.h"

enum { OFFER, EXCHANGE, CONFIRM };

#define HANDLE_TAG (UINT64_C(0x7077) << 48)

/* What a rank says about its part: fits into the line. */
struct offer {
    uint64_t size, offset, bytes; /* of the window; where it begins in its block; of the block */
    uint64_t at;                  /* for ranks of the same process */
    uint64_t name;                /* where it waits for descriptors */
    uint32_t usable;
    uint32_t reserved;
};

_Static_assert(sizeof(struct offer) <= HOST_INLINE, "an offer travels in the line");

/* One rank's part, as this process sees it. */
struct view {
    char *at;
    size_t size;
    void *map; /* of another process's block; */
    size_t mapped;
    struct host_block *block; /* or of this process's */
};

struct host_window {
    struct host_window *next;
    uint64_t handle;
    void *user;
    size_t size;
    int flags, nranks;
    struct host_block *block; /* this rank's own memory, which it covers */
    struct view views[];
};

struct host_registration {
    struct host_window *window; /* until it is the communicator's */
    ncclWindow_t *out;
    uint64_t handle; /* 0: there is no window */
    int phase;
    uint8_t vote; /* what is gathered in the last meeting: nothing but the presence */
    uint8_t *votes;
    struct host_fdpass pass;
    uint8_t *given, *taken; /* by rank */
    struct offer offers[];  /* one a rank, and this rank's own behind them */
};

static uint64_t last_handle;

/* ---- windows ----------------------------------------------------------------------------------------- */

static void drop(struct host_window *win) {
    if (!win)
        return;
    for (int r = 0; r < win->nranks; r++) {
        struct view *v = &win->views[r];
        if (v->map)
            munmap(v->map, v->mapped);
        if (v->block)
            host_block_release(v->block);
    }
    if (win->block) {
        host_block_cover(win->block, -1);
        host_block_release(win->block);
    }
    free(win);
}

static struct host_window *make(const struct ncclComm *c, void *buff, size_t size, int flags,
    struct host_block *block) {
    struct host_window *win = calloc(1, sizeof *win + (size_t)c->nranks * sizeof *win->views);
    if (!win)
        return NULL;
    win->user = buff;
    win->size = size;
    win->flags = flags;
    win->nranks = c->nranks;
    win->block = block;
    if (block)
        host_block_cover(block, 1);
    return win;
}

static void enlist(struct ncclComm *c, struct host_window *win) {
    host_lock();
    win->handle = HANDLE_TAG | ++last_handle;
    win->next = c->windows;
    c->windows = win;
    host_unlock();
}

/* Locked. */
static struct host_window **find(struct ncclComm *c, ncclWindow_t handle) {
    struct host_window **p = &c->windows;
    while (*p && (*p)->handle != (uint64_t)(uintptr_t)handle)
        p = &(*p)->next;
    return p;
}

int host_window_find(struct ncclComm *c, ncclWindow_t handle, int rank, struct host_target *out) {
    host_lock();
    const struct host_window *win = *find(c, handle);
    if (win)
        *out = (struct host_target){win->views[rank].at, win->views[rank].size, win->flags, win->user};
    host_unlock();
    return win != NULL;
}

int host_window_holds(struct ncclComm *c, const void *at, size_t bytes, int flags) {
    int yes = 0;
    host_lock();
    for (const struct host_window *win = c->windows; win && !yes; win = win->next) {
        uintptr_t offset = (uintptr_t)at - (uintptr_t)win->user;
        yes = (win->flags & flags) == flags && offset < win->size && bytes <= win->size - offset;
    }
    host_unlock();
    return yes;
}

int host_window_end(struct ncclComm *c, ncclWindow_t handle) {
    host_lock();
    struct host_window **p = find(c, handle), *win = *p;
    if (win)
        *p = win->next;
    host_unlock();
    drop(win);
    return win != NULL;
}

void host_windows_end(struct ncclComm *c) {
    host_lock();
    struct host_window *win = c->windows;
    c->windows = NULL;
    host_unlock();
    while (win) {
        struct host_window *next = win->next;
        drop(win);
        win = next;
    }
}

/* ---- registration ------------------------------------------------------------------------------------ */

int host_window_set(struct host_work *w, struct ncclComm *c, void *buff, size_t size, int flags,
    struct host_block *block, ncclWindow_t *out) {
    size_t n = (size_t)c->nranks;
    struct host_registration *reg = calloc(1, sizeof *reg + (n + 1) * sizeof *reg->offers + 3 * n);
    struct host_window *win = reg ? make(c, buff, size, flags, block) : NULL;
    if (!win) {
        free(reg);
        if (block)
            host_block_release(block);
        return 0;
    }
    struct offer *own = &reg->offers[n];
    *own = (struct offer){.size = size, .at = (uintptr_t)buff};
    if (block) {
        own->usable = 1;
        own->offset = (uint64_t)((char *)buff - block->at);
        own->bytes = block->bytes;
    }
    reg->window = win;
    reg->out = out;
    reg->pass.listener = reg->pass.guest = -1;
    reg->given = (uint8_t *)(own + 1);
    reg->taken = reg->given + n;
    reg->votes = reg->taken + n;
    struct host_call call = {.send = own,
        .recv = reg->offers,
        .count = sizeof *own,
        .nbytes = sizeof *own,
        .kind = HOST_WINDOW,
        .dtype = ncclInt8};
    host_work_set(w, HOST_WORK_WINDOW, c, &call);
    w->registration = reg;
    return 1;
}

void host_window_settle(struct host_work *w) {
    struct host_registration *reg = w->registration;
    if (!reg)
        return;
    if (w->done && !w->result) /* the window itself may have ended since: only the number counts */
        *reg->out = (ncclWindow_t)(uintptr_t)reg->handle;
    drop(reg->window);
    host_fdpass_close(&reg->pass);
    free(reg);
    w->registration = NULL;
}

static int is_here(const struct host_work *w, int rank) {
    return host_seat(w->comm->map, rank)->pid == host_seat(w->comm->map, w->comm->rank)->pid;
}

static enum host_step fail_errno(struct host_work *w, const char *what) {
    int err = errno;
    w->result = host_fail(ncclSystemError, "CommWindowRegister: rank %d %s: %s", w->comm->rank, what, strerror(err));
    return HOST_FAILED;
}

/* Before anything is told: where the others can give their descriptors. */
static int listen_to_others(struct host_work *w) {
    struct host_registration *reg = w->registration;
    int r = 0, n = w->comm->nranks;
    while (r < n && is_here(w, r))
        r++;
    if (r == n || !reg->offers[n].usable || reg->pass.listener >= 0)
        return 1;
    reg->pass.listener = host_fdpass_listen(&reg->pass.name);
    reg->offers[n].name = reg->pass.name;
    return reg->pass.listener >= 0;
}

/* A rank of this process: its memory is where it says, as long as somebody refers to it. */
static int see_local(struct host_work *w, int r) {
    struct host_registration *reg = w->registration;
    struct view *v = &reg->window->views[r];
    v->at = (char *)(uintptr_t)reg->offers[r].at;
    v->size = reg->offers[r].size;
    v->block = host_block_hold(v->at);
    reg->given[r] = reg->taken[r] = 1;
    errno = EFAULT;
    return v->block != NULL;
}

/* The file cannot shrink any more, so no access to the mapping can fault. */
static int is_as_said(int fd, const struct offer *o) {
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    return fstat(fd, &st) == 0 && seals >= 0 && seals & F_SEAL_SHRINK && (uint64_t)st.st_size == o->bytes &&
           o->offset <= o->bytes && o->size <= o->bytes - o->offset;
}

static int see_remote(struct host_work *w, int r, int fd) {
    struct host_registration *reg = w->registration;
    const struct offer *o = &reg->offers[r];
    struct view *v = &reg->window->views[r];
    errno = EPROTO;
    if (!is_as_said(fd, o))
        return 0;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), skip = o->offset % page;
    void *map = mmap(NULL, o->size + skip, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(o->offset - skip));
    if (map == MAP_FAILED)
        return 0;
    v->map = map;
    v->mapped = o->size + skip;
    v->at = (char *)map + skip;
    v->size = o->size;
    madvise(v->map, v->mapped, MADV_DONTFORK);
    madvise(v->map, v->mapped, MADV_DONTDUMP);
    reg->taken[r] = 1;
    return 1;
}

static enum host_step begin_exchange(struct host_work *w) {
    struct host_registration *reg = w->registration;
    int n = w->comm->nranks, usable = 1;
    for (int r = 0; r < n; r++)
        usable &= (int)reg->offers[r].usable;
    if (!usable) /* everybody sees the same offers */
        return HOST_FINISHED;
    reg->phase = EXCHANGE;
    for (int r = 0; r < n; r++)
        if (is_here(w, r) && !see_local(w, r))
            return fail_errno(w, "cannot find the memory of another rank of its process");
    if (reg->pass.listener >= 0)
        host_block_export(reg->window->block);
    return HOST_MOVED;
}

static int give_all(struct host_work *w, int *moved) {
    struct host_registration *reg = w->registration;
    for (int r = 0; r < w->comm->nranks; r++) {
        if (reg->given[r])
            continue;
        int done = host_fdpass_give(
            reg->offers[r].name, host_seat(w->comm->map, r)->pid, w->comm->rank, reg->window->block->fd);
        if (done < 0)
            return 0;
        reg->given[r] = (uint8_t)done;
        *moved |= done;
    }
    return 1;
}

static int take_all(struct host_work *w, int *moved) {
    struct host_registration *reg = w->registration;
    int from, pid, fd;
    while (reg->pass.listener >= 0 && host_fdpass_take(&reg->pass, &from, &pid, &fd)) {
        int good = 1;
        if (from >= 0 && from < w->comm->nranks && !reg->taken[from] && pid == host_seat(w->comm->map, from)->pid)
            good = see_remote(w, from, fd);
        int err = errno;
        close(fd);
        errno = err;
        if (!good)
            return 0;
        *moved = 1;
    }
    return 1;
}

static enum host_step exchange(struct host_work *w) {
    struct host_registration *reg = w->registration;
    int moved = 0;
    if (!give_all(w, &moved))
        return fail_errno(w, "cannot give its memory to the others");
    if (!take_all(w, &moved))
        return fail_errno(w, "cannot map the memory of another rank");
    if (host_window_missing(w, 0) >= 0)
        return moved ? HOST_MOVED : HOST_STALLED;
    host_fdpass_close(&reg->pass);
    reg->phase = CONFIRM;
    w->u.collective.seq = 0;
    w->call.send = &reg->vote;
    w->call.recv = reg->votes;
    w->call.count = w->call.nbytes = sizeof reg->vote;
    return HOST_MOVED;
}

enum host_step host_window_step(struct host_work *w) {
    struct host_registration *reg = w->registration;
    if (reg->phase == OFFER && !w->u.collective.seq && !listen_to_others(w))
        return fail_errno(w, "cannot listen");
    if (reg->phase == EXCHANGE)
        return exchange(w);
    enum host_step step = host_collective_step(w);
    if (step != HOST_FINISHED)
        return step;
    if (reg->phase == OFFER)
        return begin_exchange(w);
    enlist(w->comm, reg->window);
    reg->handle = reg->window->handle;
    reg->window = NULL;
    return HOST_FINISHED;
}

int host_window_missing(const struct host_work *w, int from) {
    const struct host_registration *reg = w->registration;
    if (reg->phase != EXCHANGE)
        return host_collective_missing(w, from);
    for (int r = from; r < w->comm->nranks; r++)
        if (!reg->given[r] || !reg->taken[r])
            return r;
    return -1;
}
