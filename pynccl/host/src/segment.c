/* Segments: the memfd behind a communicator, and this process's mappings of them.
 *
 * A segment has no name: its descriptor travels over the rendezvous socket and is closed after mapping, so
 * nothing is left behind whatever dies. It is sealed against resizing. The file is sparse; what every
 * communicator needs (seats, lines, gears) is reserved at creation, the rest by host_segment_reserve at
 * first use.
 *
 * All ranks of a process share one mapping, found by the segment's id in the list `maps`. Guarded by
 * host_lock (comm.c). A forked child does not use its parent's mappings: they carry the generation.
 */
#include "host.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comm.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static struct host_map *maps;

static size_t pages(size_t bytes) {
    return (bytes + HOST_PAGE - 1) / HOST_PAGE * HOST_PAGE;
}

static size_t ring_chunk(int nranks) {
    /* There are n * n rings: keep the address space they take in bounds. */
    return nranks <= 16 ? 64 << 10 : nranks <= 64 ? 32 << 10 : 8 << 10;
}

void host_layout_of(int nranks, struct host_layout *out) {
    size_t n = (size_t)nranks;
    size_t at = HOST_PAGE;
    out->ring_chunk = ring_chunk(nranks);
    out->seat = at;
    at += n * sizeof(struct host_seat);
    out->line = at;
    at += 4 * n * sizeof(struct host_line);
    out->gear = at;
    at += n * sizeof(struct host_gear);
    at = pages(at);
    out->pair = at;
    at = pages(at + n * n * sizeof(struct host_pair));
    out->slot = at;
    at += 2 * n * HOST_SLOT;
    out->stage = at;
    at += n * HOST_PLACES * HOST_CHUNK;
    out->result = at;
    at += HOST_PLACES * HOST_CHUNK;
    out->ring = at;
    at += n * n * HOST_PLACES * out->ring_chunk;
    out->signal = at;
    at = pages(at + HOST_CONTEXTS * n * n * HOST_LINE);
    out->bytes = at;
}

uint32_t host_stamp(void) {
    /* Two layouts that differ anywhere differ in the offsets of a communicator of some size. */
    static const int sizes[] = {2, 17, 65};
    uint32_t h = 2166136261u ^ HOST_FORMAT;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct host_layout at;
        host_layout_of(sizes[i], &at);
        const size_t parts[] = {at.seat,   at.line, at.gear,   at.pair,  at.slot,      at.stage,
                                at.result, at.ring, at.signal, at.bytes, at.ring_chunk};
        for (size_t j = 0; j < sizeof parts / sizeof *parts; j++)
            h = (h ^ (uint32_t)(parts[j] ^ (parts[j] >> 32))) * 16777619u;
    }
    return h & 0x7fffffffu;
}

static struct host_map *map_fd(int fd, int nranks) {
    struct host_map *map = calloc(1, sizeof *map);
    if (!map)
        return NULL;
    host_layout_of(nranks, &map->at);
    map->nranks = nranks;
    map->users = 1;
    map->generation = host_generation();
    void *base = mmap(NULL, map->at.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        free(map);
        return NULL;
    }
    map->base = base;
    madvise(base, map->at.bytes, MADV_DONTDUMP);
    return map;
}

static void enlist(struct host_map *map) {
    host_lock();
    map->next = maps;
    maps = map;
    host_unlock();
}

int host_segment_create(int nranks, const uint8_t id[HOST_ID], struct host_map **out) {
    struct host_layout at;
    host_layout_of(nranks, &at);
    int fd = memfd_create("pynccl", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -1;
    struct host_map *map = NULL;
    int err = 0;
    if (ftruncate(fd, (off_t)at.bytes) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0 ||
        !(map = map_fd(fd, nranks)))
        err = errno ? errno : ENOMEM;
    else
        err = host_segment_reserve(map, 0, at.pair);
    if (err) {
        if (map)
            munmap(map->base, at.bytes);
        free(map);
        close(fd);
        errno = err;
        return -1;
    }
    struct host_header *h = host_header(map);
    h->stamp = host_stamp();
    h->nranks = (uint32_t)nranks;
    h->bytes = at.bytes;
    memcpy(h->id, id, HOST_ID);
    h->magic = HOST_MAGIC;
    enlist(map);
    *out = map;
    return fd;
}

static struct host_map *find(const uint8_t id[HOST_ID]) {
    struct host_map *m = maps;
    while (m && (m->generation != host_generation() || memcmp(host_header(m)->id, id, HOST_ID)))
        m = m->next;
    if (m)
        m->users++;
    return m;
}

struct host_map *host_segment_attach(int fd, int nranks, const uint8_t id[HOST_ID]) {
    /* One lock over look-up and mapping: two ranks of this process may attach at the same time, and the
     * sanitizers (and the caches) want them to see the same addresses. */
    host_lock();
    struct host_map *map = find(id);
    struct stat st;
    if (!map && fstat(fd, &st) == 0) {
        struct host_layout at;
        host_layout_of(nranks, &at);
        errno = EPROTO;
        if ((size_t)st.st_size == at.bytes && (map = map_fd(fd, nranks)) != NULL) {
            struct host_header *h = host_header(map);
            if (h->magic == HOST_MAGIC && h->stamp == host_stamp() && (int)h->nranks == nranks &&
                memcmp(h->id, id, HOST_ID) == 0) {
                map->next = maps;
                maps = map;
            } else {
                munmap(map->base, at.bytes);
                free(map);
                map = NULL;
                errno = EPROTO;
            }
        }
    }
    host_unlock();
    return map;
}

void host_segment_detach(struct host_map *map) {
    host_lock();
    int last = --map->users == 0;
    if (last) {
        struct host_map **p = &maps;
        while (*p && *p != map)
            p = &(*p)->next;
        if (*p)
            *p = map->next;
    }
    host_unlock();
    if (!last)
        return;
    munmap(map->base, map->at.bytes);
    free(map);
}

int host_segment_reserve(struct host_map *map, size_t at, size_t bytes) {
    size_t first = at / HOST_PAGE * HOST_PAGE;
    size_t length = pages(at + bytes) - first;
    if (madvise(map->base + first, length, MADV_POPULATE_WRITE) == 0)
        return 0;
    /* Before Linux 5.14 the advice is unknown: pages then come into being when they are touched. */
    return errno == EINVAL ? 0 : errno;
}
