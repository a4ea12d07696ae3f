/* Items and streams: what queue.c (items), stream.c (streams and events) and nobody else sees.
 *
 * One lock guards all of it. It is never held while a call runs, while anything waits, or together with
 * another lock, and it is held across a fork, so that a child finds it free.
 */
#ifndef PYNCCL_HOST_ITEM_H
#define PYNCCL_HOST_ITEM_H

#include <pthread.h>

#include "queue.h"

enum host_item_kind {
    HOST_ITEM_CALLS, /* of NCCL: one call, or a group */
    HOST_ITEM_WAIT,  /* nothing but an order: a stream waits for another item */
    HOST_ITEM_FUNCTION,
};

/* Created by one thread, driven by one thread at a time (`driven`), done once. Who holds a reference may look at
 * `done`, `ended`, `result` and `text`. */
struct host_item {
    struct host_item *next; /* in its stream */
    struct host_stream *stream;
    enum host_item_kind kind;
    int refs;
    int driven; /* a thread works at it now */
    int begun;  /* one has: its communicators are entered */
    int done;
    uint64_t due;   /* host_now: not before (delay injection) */
    uint64_t ended; /* host_now, when it is done */
    ncclResult_t result;
    char *text; /* of a failure */

    struct host_item **after; /* earlier items of other streams that must be done first; each is referred to */
    int nafter;

    struct host_item *part_of; /* WAIT: the group that has this stream's calls, and fails for it, too */

    struct host_work **works;
    int n;
    struct ncclComm **comms; /* each once; NULL in the place of one that was emptied before the item began */
    int ncomms;

    void (*function)(void *);
    void *argument;

    void *owner; /* of the arrays */
    void (*release)(void *);

    /* Room for one call: then everything is one piece of memory. */
    struct host_item *one_after[1];
    struct host_work *one_work[1];
    struct ncclComm *one_comm[1];
    struct host_work work;
};

/* What a handle names. A handle is a tag, a serial number and a place in a table; it is looked up and never
 * followed, so that any number is answered with an error at worst. */
struct host_named {
    uintptr_t handle; /* 0: the place is free */
    uint32_t place;
    uint32_t generation; /* of forks */
    struct host_named *next; /* free places */
};

struct host_table {
    uintptr_t tag;
    uint32_t serial, n, room;
    struct host_named **rows, *free;
};

struct host_stream {
    struct host_named name;
    struct host_item *head, *tail;
    int prepared; /* `changed` has been set up: once for the place */
    int closed; /* destroyed: ends when it is empty */
    int worker; /* its thread runs */
    int asleep; /* the worker waits for `changed`, and must be woken for new items */
    int waiters; /* others who wait for `changed` */
    pthread_cond_t changed;
    uint64_t active; /* host_now: when something was last queued or done */

    ncclResult_t error; /* the first that nobody has heard of */
    char *text;

    uint64_t delay, spread; /* ns: delay injection */
    uint64_t dice;
};

/* ---- items (queue.c); `locked`: the lock must be held ---- */

void host_items_lock(void);
void host_items_unlock(void);
/* Prepare for streams: once a process. */
void host_items_start(void);

struct host_item *host_item_new(enum host_item_kind kind, int nafter);
void host_item_drop(struct host_item *item); /* one that was not appended */
void host_item_unref(struct host_item *item); /* locked */
/* The item comes after another one; nothing if that is done, or NULL. Locked. */
void host_item_depend(struct host_item *item, struct host_item *on);
/* 0: the stream has no thread, and none can be made. Locked. */
int host_item_prepare(struct host_stream *s);
/* To the end of a prepared stream. Locked. */
void host_item_append(struct host_stream *s, struct host_item *item);
/* It has no calls of this communicator any more. Locked. */
void host_item_forget(struct host_item *item, struct ncclComm *c);
/* Its first failure stays; no effect with ncclSuccess. Locked, or by its driver. */
void host_item_fail(struct host_item *item, ncclResult_t code, const char *text);
/* Wait for an item, and run what must come before it and has not started. ncclSuccess, ncclTimeout at `until`, or
 * ncclSystemError if the hook says stop; nothing about how it went. Locked, and let go in between. */
ncclResult_t host_item_await(struct host_item *item, uint64_t until);

/* ---- streams (stream.c) ---- */

/* A row of the given size, which begins with a host_named; new ones are zero, used ones as they were left. NULL without memory. All locked. */
void *host_table_add(struct host_table *table, size_t size);
void *host_table_find(const struct host_table *table, uintptr_t handle);
void host_table_remove(struct host_table *table, struct host_named *row);

/* NULL if there is no such stream in this process. Locked. */
struct host_stream *host_stream_find(uintptr_t handle);
/* NULL, a code and a text, if there is no memory or PYNCCL_HOST_DELAY is not understood. Locked. */
struct host_stream *host_stream_new(ncclResult_t *code);
/* The worker has ended, or none was needed. Locked. */
void host_stream_free(struct host_stream *s);
/* No handle any more; ends when it is empty. Locked. */
void host_stream_close(struct host_stream *s);
/* The stream in this place of the table, be it in use or not; NULL behind the last. Locked. */
struct host_stream *host_stream_at(uint32_t place);
/* How long a call of this rank is to lie there before it may run. Locked. */
uint64_t host_stream_delay(struct host_stream *s, int rank);
/* The first error that nobody has heard of, which is now told. Locked. */
ncclResult_t host_stream_tell(struct host_stream *s, const char *what);

#endif
