/* The shared memory of one communicator, described as data.
 *
 *   memfd, sparse: only pages that are used exist.          (n = nranks; sizes in bytes)
 *   +----------------------------------------------------------------------------------------------+
 *   | header     magic, stamp, n, id                                             one page           |
 *   |            sleepers: how many ranks sleep on their bell                                       |
 *   | seat[n]    who sits here (pid, start time), state, why it gave up, bell    1024 each          |
 *   | line[4][n] sequence number, fingerprint, up to 48 bytes of data; the last  128 each           |
 *   |            two of each rank for what is agreed about after a revocation                       |
 *   | gear[n]    chunks put in, reduced, taken out                               384 each           |
 *   | pair[n][n] mail[2] and head (sender's), order and tail (receiver's)        512 each           |
 *   | slot[2][n] the whole input of a small collective                           64 Ki each         |
 *   | stage[n][4] one rank's input of a chunk                                    256 Ki each        |
 *   | result[4]  the reduced chunk, each rank writes its part                    256 Ki each        |
 *   | ring[n][n][4] chunks of a large message                                    64 Ki .. 8 Ki each |
 *   | signal[16][n][n] of a context, from rank to rank: 16 counters              128 each           |
 *   +----------------------------------------------------------------------------------------------+
 *
 * One writer per word. A rank writes its own seat, its own line and gear, its slots and stage, its part of
 * a result, mail, ring and signals of the pairs it sends on, order and tail of those it receives on. The exceptions
 * are `sleepers`, the bells, and a seat's state, which any rank may turn from ACTIVE to DEAD, as its `gone`.
 *
 * Collective q (the first is 1) of a rank:
 *   1. its input, or the first chunk of it, goes to its slot or stage; up to 48 bytes go into the line;
 *   2. the fingerprint goes into line[q & 1][rank], then its `seq` becomes q;
 *   3. it waits until every line[q & 1][*] has seq q and compares the fingerprints. Only then is a receive
 *      buffer touched. All ranks compare all fingerprints, so a disagreement is seen by every rank.
 * Lines and slots need no acknowledgement: a rank writes those of q + 2 after it has seen every rank at
 * q + 1, and a rank publishes q + 1 after it has read all it wants of q.
 *
 * Larger collectives go through the stage in chunks, counted from 0 over the communicator's life; chunk K
 * uses place K & 3. gear[r].in > K: rank r's input of K is in its stage. gear[r].red > K: its part of
 * result K is there. gear[r].out > K: it will not read anything of K again. A rank overwrites place K & 3
 * when every other rank's `out` exceeds K - 4.
 *
 * Message i (the first is 1) of the pair s -> d: the sender describes it in mail[i & 1] and the receiver in
 * order.desc[i & 1]; each compares both before it goes on. Up to 48 bytes travel in the mail, more in
 * chunks through the ring (head: chunks put, tail: chunks taken). The sender does not return before the
 * receive is posted, which is also what makes two mails enough.
 *
 * Signal i (the first is 1) of a pair, context and index: the sender writes what it puts into the receiver's
 * memory, then the counter becomes i. It never goes back; how much of it has been waited for is the receiver's
 * own business.
 */
#ifndef PYNCCL_HOST_HOST_H
#define PYNCCL_HOST_HOST_H

#include <stdalign.h>
#include <stddef.h>
#include <stdint.h>

#include "sync.h"

#define HOST_MAGIC UINT64_C(0x74736f686c63636e) /* "ncclhost" */
#define HOST_FORMAT 4u

enum {
    HOST_MAX_RANKS = 1024,
    HOST_LINE = 128, /* two cache lines: some processors prefetch them in pairs */
    HOST_INLINE = 48,
    HOST_SLOT = 64 << 10,
    HOST_CHUNK = 256 << 10,
    HOST_PLACES = 4,
    HOST_ID = 16,
    HOST_CONTEXTS = 16,
    HOST_SIGNALS = HOST_LINE / 8,
    HOST_PAGE = 4096,
};

enum host_state {
    HOST_EMPTY,
    HOST_ACTIVE,
    HOST_FINALIZED, /* ncclCommFinalize */
    HOST_DESTROYED, /* ncclCommDestroy */
    HOST_EXITED,    /* its process exited normally */
    HOST_ABORTED,   /* ncclCommAbort */
    HOST_BROKEN,    /* gave up after an error: see code and text */
    HOST_DEAD,      /* its process died; written by the rank that noticed */
    HOST_REVOKED,   /* ncclCommRevoke: no more operations, but splits and shrinks */
};

struct host_header {
    uint64_t magic;
    uint32_t stamp;
    uint32_t nranks;
    uint8_t id[HOST_ID];
    uint64_t bytes;
    alignas(HOST_LINE) host_u32 sleepers;
    host_u32 releasing; /* 1 while a rank gives the buffers of a suspended communicator back */
};

struct host_seat {
    int32_t pid;
    int32_t code; /* ncclResult_t, valid when state is BROKEN */
    uint64_t start; /* start time of the process, as in /proc/PID/stat */
    host_u32 state;
    /* While this rank has waited for a while, for the texts of others: a rank of this communicator + 1, and
     * the process that its thread waits for in another communicator. Else 0. */
    host_u32 waits_for, waits_outside;
    host_u32 gone; /* how a BROKEN or REVOKED rank left for good: an enum host_state, 0 while it has not */
    host_u32 suspended; /* this rank makes no calls until it resumes, and reads no buffer */
    char text[600];
    alignas(HOST_LINE) struct host_bell bell;
    alignas(HOST_LINE) char reserved[HOST_LINE * 2];
};

struct host_line {
    alignas(HOST_LINE) host_u64 seq;
    uint64_t print; /* fingerprint: struct host_call packed by host_call_print */
    uint8_t data[HOST_INLINE];
};

struct host_gear {
    alignas(HOST_LINE) host_u64 in;
    alignas(HOST_LINE) host_u64 red;
    alignas(HOST_LINE) host_u64 out;
};

struct host_mail {
    host_u64 seq;
    uint64_t desc;
    uint8_t data[HOST_INLINE];
};

struct host_order {
    host_u64 seq;
    uint64_t desc[2];
};

struct host_pair {
    alignas(HOST_LINE) struct host_mail mail[2];
    alignas(HOST_LINE) struct host_order order;
    alignas(HOST_LINE) host_u64 head;
    alignas(HOST_LINE) host_u64 tail;
};

_Static_assert(sizeof(struct host_header) <= HOST_PAGE, "the header is one page");
_Static_assert(sizeof(struct host_seat) == 1024, "as drawn");
_Static_assert(sizeof(struct host_line) == HOST_LINE, "as drawn");
_Static_assert(sizeof(struct host_gear) == 3 * HOST_LINE, "as drawn");
_Static_assert(sizeof(struct host_pair) == 4 * HOST_LINE, "as drawn");
_Static_assert(sizeof(struct host_mail) == 64, "one cache line");

/* Where everything is, for n ranks. Computed by every process for itself; the stamp guards agreement. */
struct host_layout {
    size_t seat, line, gear, pair, slot, stage, result, ring, signal, bytes;
    size_t ring_chunk;
};

void host_layout_of(int nranks, struct host_layout *out);

/* Equal in two processes exactly if they agree about everything above. */
uint32_t host_stamp(void);

/* A mapped segment; one a process, shared by its ranks. */
struct host_map {
    struct host_map *next;
    char *base;
    struct host_layout at;
    int nranks;
    int users;
    uint32_t generation; /* of forks, see comm.h */
};

/* Make a new segment and return its descriptor, or -1 with errno. The mapping is the caller's. */
int host_segment_create(int nranks, const uint8_t id[HOST_ID], struct host_map **out);
/* Map the segment behind `fd`, or find this process's mapping of it. NULL with errno, EPROTO for a segment
 * that is not what it should be. */
struct host_map *host_segment_attach(int fd, int nranks, const uint8_t id[HOST_ID]);
void host_segment_detach(struct host_map *map);
/* Make the pages exist now, so that lack of memory is an error here and not a signal later. 0 or errno. */
int host_segment_reserve(struct host_map *map, size_t at, size_t bytes);

static inline struct host_header *host_header(const struct host_map *m) {
    return (struct host_header *)(void *)m->base;
}

static inline struct host_seat *host_seat(const struct host_map *m, int rank) {
    return (struct host_seat *)(void *)(m->base + m->at.seat) + rank;
}

/* Sequence numbers of this size and above belong to the council: the splits of a revoked communicator, whose
 * ranks may have stopped at different collectives. They count for themselves and have lines of their own. */
#define HOST_COUNCIL (UINT64_C(1) << 62)

static inline struct host_line *host_line(const struct host_map *m, uint64_t seq, int rank) {
    size_t which = (seq & 1) | (seq >> 61 & 2);
    return (struct host_line *)(void *)(m->base + m->at.line) + which * (size_t)m->nranks + rank;
}

static inline struct host_gear *host_gear(const struct host_map *m, int rank) {
    return (struct host_gear *)(void *)(m->base + m->at.gear) + rank;
}

static inline struct host_pair *host_pair(const struct host_map *m, int from, int to) {
    return (struct host_pair *)(void *)(m->base + m->at.pair) + (size_t)from * m->nranks + to;
}

static inline char *host_slot(const struct host_map *m, uint64_t seq, int rank) {
    return m->base + m->at.slot + ((seq & 1) * (size_t)m->nranks + rank) * HOST_SLOT;
}

static inline char *host_stage(const struct host_map *m, int rank, uint64_t chunk) {
    return m->base + m->at.stage + ((size_t)rank * HOST_PLACES + chunk % HOST_PLACES) * HOST_CHUNK;
}

static inline char *host_result(const struct host_map *m, uint64_t chunk) {
    return m->base + m->at.result + chunk % HOST_PLACES * HOST_CHUNK;
}

static inline host_u64 *host_signal(const struct host_map *m, int from, int to, int context, int index) {
    size_t n = (size_t)m->nranks, line = ((size_t)context * n + (size_t)from) * n + (size_t)to;
    return (host_u64 *)(void *)(m->base + m->at.signal) + line * HOST_SIGNALS + index;
}

static inline size_t host_ring_at(const struct host_map *m, int from, int to) {
    return m->at.ring + ((size_t)from * m->nranks + to) * HOST_PLACES * m->at.ring_chunk;
}

#endif
