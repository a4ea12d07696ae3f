/* Clocks, naps, and the sleep protocol of the waiting loop.
 *
 * A publisher does not fence: it stores its counter, goes on, and only then looks at `sleepers`. On a machine
 * with store buffers it may look before its store can be seen, while the sleeper, having announced itself,
 * looks for the last time and finds nothing: the ring is lost. That window is some tens of nanoseconds wide,
 * and a sleeper never sleeps longer than HOST_SLEEP_NS at a stretch (it has to poll the interrupt hook
 * anyway), so a lost ring costs milliseconds, once, and only to a rank that had already waited for longer
 * than it takes to decide to sleep. A fence in every publication would cost every call a cache miss.
 */
#include "sync.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

uint64_t host_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int host_cpus(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) {
        long n = sysconf(_SC_NPROCESSORS_ONLN);
        return n > 0 ? (int)n : 1;
    }
    int n = CPU_COUNT(&set);
    return n > 0 ? n : 1;
}

void host_yield(void) {
    sched_yield();
}

void host_nap(uint64_t ns) {
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    nanosleep(&t, NULL);
}

uint32_t host_bell_arm(struct host_bell *b, host_u32 *sleepers) {
    uint32_t armed = host_observe32(&b->bell);
    host_publish32(&b->asleep, 1);
    /* Full fence: the caller's last look must come after the announcement. */
    host_add32(sleepers, 1);
    return armed;
}

void host_bell_sleep(struct host_bell *b, uint32_t armed, uint64_t ns) {
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    syscall(SYS_futex, &b->bell, FUTEX_WAIT, armed, &t, NULL, 0);
}

void host_bell_disarm(struct host_bell *b, host_u32 *sleepers) {
    host_publish32(&b->asleep, 0);
    host_add32(sleepers, (uint32_t)-1);
}

void host_bell_ring(struct host_bell *b) {
    if (!host_peek32(&b->asleep))
        return;
    host_add32(&b->bell, 1);
    syscall(SYS_futex, &b->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}
