/* Every atomic access, fence, pause, nap and clock of the host library; nothing else touches shared words.
 *
 * The rule of the whole library is one writer per word. A rank writes plain data, then stores a counter
 * with host_publish(); another rank that reads the counter with host_observe() and finds the new value may
 * read the data. Counters only grow, so a waiting rank may look late and never misses a value.
 *
 * Two places need more than that and say so where they are: the sleep protocol (sync.c: a rank that is
 * about to sleep and a rank that has just published must not both miss the other), and the words that
 * several ranks write (rank states, the failure record), which use compare-and-swap.
 */
#ifndef PYNCCL_HOST_SYNC_H
#define PYNCCL_HOST_SYNC_H

#include <stdatomic.h>
#include <stdint.h>

typedef _Atomic uint64_t host_u64;
typedef _Atomic uint32_t host_u32;

/* Make everything written before visible to whoever observes `value`. Pairs with host_observe. */
static inline void host_publish(host_u64 *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_release);
}

/* Pairs with host_publish: what its caller wrote before may be read once the value is seen. */
static inline uint64_t host_observe(host_u64 *word) {
    return atomic_load_explicit(word, memory_order_acquire);
}

/* A word that this thread alone writes, or of which nothing but its value is wanted. */
static inline uint64_t host_peek(host_u64 *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

/* The same for 32-bit words (rank states, doorbells). */
static inline void host_publish32(host_u32 *word, uint32_t value) {
    atomic_store_explicit(word, value, memory_order_release);
}

static inline uint32_t host_observe32(host_u32 *word) {
    return atomic_load_explicit(word, memory_order_acquire);
}

/* A hint only: nothing may be concluded from the value but "look again". */
static inline uint32_t host_peek32(host_u32 *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

/* Take a word from `from` to `to`; false if somebody else changed it first. A full fence, as the two below:
 * what this thread does next cannot move before it. */
static inline int host_claim32(host_u32 *word, uint32_t from, uint32_t to) {
    return atomic_compare_exchange_strong_explicit(
        word, &from, to, memory_order_seq_cst, memory_order_seq_cst);
}

static inline uint32_t host_swap32(host_u32 *word, uint32_t value) {
    return atomic_exchange_explicit(word, value, memory_order_seq_cst);
}

static inline uint32_t host_add32(host_u32 *word, uint32_t value) {
    return atomic_fetch_add_explicit(word, value, memory_order_seq_cst);
}

static inline void host_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Monotonic time in nanoseconds. */
uint64_t host_now(void);

/* CPUs that this process may use (its affinity mask), at least 1. */
int host_cpus(void);

void host_yield(void);
void host_nap(uint64_t ns);

/* ---- sleeping ------------------------------------------------------------------------------------ */

/* One per rank, in shared memory. `bell` is the futex word; it changes whenever somebody rings. */
struct host_bell {
    host_u32 bell;
    host_u32 asleep;
};

/* Announce the intention to sleep; returns the value to pass to host_bell_sleep. The caller must look at
 * everything it waits for once more between the two. `sleepers` counts the announced sleepers of the
 * segment. */
uint32_t host_bell_arm(struct host_bell *b, host_u32 *sleepers);
/* Sleep until rung or `ns` have passed, unless the bell changed since arm. */
void host_bell_sleep(struct host_bell *b, uint32_t armed, uint64_t ns);
void host_bell_disarm(struct host_bell *b, host_u32 *sleepers);
/* Wake the bell's owner if it sleeps. */
void host_bell_ring(struct host_bell *b);

#endif
