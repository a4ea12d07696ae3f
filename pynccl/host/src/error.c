/* Error texts and the debug log.
 *
 * NCCL keeps one last error a process: written by whoever fails, never cleared, read without a lock through
 * a pointer that the caller may keep. To make that safe the texts go round a ring of buffers, each written
 * by one thread at a time under `lock`; a text that has been handed out is overwritten only RING failures
 * later. Beside it each thread has its own last text, which is what the Python layer reports.
 *
 * NCCL_DEBUG is read at the first use, and at the first after host_log_reset; the log goes to stdout or to NCCL_DEBUG_FILE, as NCCL's does.
 */
#include "error.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sync.h"

enum { RING = 32 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char ring[RING][HOST_TEXT];
static host_u32 ring_at;
static _Thread_local char own[HOST_TEXT];

static host_u32 log_known; /* the two below are set */
static host_u32 log_level;
static FILE *_Atomic log_file;

static void hold(void) {
    pthread_mutex_lock(&lock);
}

static void release(void) {
    pthread_mutex_unlock(&lock);
}

/* A thread of a job may be failing while the program forks; the child must not find the lock taken. */
__attribute__((constructor)) static void guard_fork(void) {
    pthread_atfork(hold, release, release);
}

static void open_file(const char *name) {
    /* %h host name, %p process id, as NCCL documents; anything else is taken as it stands. */
    char path[1024], host[256] = "localhost";
    struct host_text t = {path, sizeof path, 0};
    gethostname(host, sizeof host - 1);
    for (const char *c = name; *c; c++) {
        if (c[0] == '%' && c[1] == 'p')
            host_text_add(&t, "%d", (int)getpid()), c++;
        else if (c[0] == '%' && c[1] == 'h')
            host_text_add(&t, "%s", host), c++;
        else
            host_text_add(&t, "%c", *c);
    }
    FILE *f = fopen(path, "we");
    if (f)
        log_file = f;
}

static void log_start(void) {
    static const char *const names[] = {"", "VERSION", "WARN", "INFO"};
    const char *level = getenv("NCCL_DEBUG");
    enum host_level found = HOST_LOG_NONE;
    log_file = stdout;
    for (int i = HOST_LOG_VERSION; level && i <= HOST_LOG_INFO; i++)
        if (strcasecmp(level, names[i]) == 0)
            found = (enum host_level)i;
    if (level && strcasecmp(level, "ATTN") == 0) /* between the two; nothing here logs at it */
        found = HOST_LOG_WARN;
    if (level && (strcasecmp(level, "ABORT") == 0 || strcasecmp(level, "TRACE") == 0))
        found = HOST_LOG_INFO;
    const char *file = getenv("NCCL_DEBUG_FILE");
    if (file && *file && found > HOST_LOG_VERSION)
        open_file(file);
    host_publish32(&log_level, found);
}

int host_log_on(enum host_level level) {
    if (!host_observe32(&log_known)) {
        pthread_mutex_lock(&lock);
        if (!host_peek32(&log_known))
            log_start();
        host_publish32(&log_known, 1);
        pthread_mutex_unlock(&lock);
    }
    return host_peek32(&log_level) >= (uint32_t)level;
}

/* A file that was open stays so: another thread may be writing to it. */
void host_log_reset(void) {
    host_publish32(&log_known, 0);
}

static void log_text(enum host_level level, const char *text) {
    char host[256] = "localhost";
    gethostname(host, sizeof host - 1);
    fprintf(log_file, "%s%s:%d:%ld [0] %s %s\n", level == HOST_LOG_WARN ? "\n" : "", host, (int)getpid(),
        (long)syscall(SYS_gettid), level == HOST_LOG_WARN ? "NCCL WARN" : "NCCL INFO", text);
    fflush(log_file);
}

void host_log(enum host_level level, const char *format, ...) {
    if (!host_log_on(level))
        return;
    char text[HOST_TEXT] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    log_text(level, text);
}

ncclResult_t host_fail(ncclResult_t code, const char *format, ...) {
    /* Through a buffer of its own: an argument may be the last text itself. */
    char text[HOST_TEXT] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(own, text, sizeof own);
    pthread_mutex_lock(&lock);
    uint32_t next = (host_peek32(&ring_at) + 1) % RING;
    memcpy(ring[next], text, sizeof ring[next]);
    host_publish32(&ring_at, next);
    pthread_mutex_unlock(&lock);
    if (host_log_on(HOST_LOG_WARN))
        log_text(HOST_LOG_WARN, text);
    return code;
}

void host_fail_recall(const char *text) {
    snprintf(own, sizeof own, "%s", text);
}

const char *host_fail_text(void) {
    return own;
}

const char *host_fail_any_text(void) {
    return ring[host_observe32(&ring_at)];
}

void host_notice(const char *format, ...) {
    char text[HOST_TEXT] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "pynccl: %s\n", text);
}

void host_text_add(struct host_text *t, const char *format, ...) {
    if (t->at >= t->size)
        return;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->buffer + t->at, t->size - t->at, format, args);
    va_end(args);
    if (n > 0)
        t->at += (size_t)n;
    if (t->at >= t->size)
        t->at = t->size;
}
