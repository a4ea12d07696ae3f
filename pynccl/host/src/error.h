/* Error texts and the debug log. See error.c. */
#ifndef PYNCCL_HOST_ERROR_H
#define PYNCCL_HOST_ERROR_H

#include "nccl_abi.h"

#define HOST_TEXT 1024

/* Record the text (for ncclGetLastError and pyncclHostLastError), log it as a warning, return `code`. */
ncclResult_t host_fail(ncclResult_t code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Make this the calling thread's last text, and nothing else: the failure has been recorded before. */
void host_fail_recall(const char *text);

/* The calling thread's last text, "" if none. */
const char *host_fail_text(void);
/* The process's. */
const char *host_fail_any_text(void);

/* NCCL_DEBUG levels as NCCL orders them. */
enum host_level { HOST_LOG_NONE, HOST_LOG_VERSION, HOST_LOG_WARN, HOST_LOG_INFO };

int host_log_on(enum host_level level);
/* Read the environment again at the next use. */
void host_log_reset(void);
void host_log(enum host_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* One line on stderr, whatever NCCL_DEBUG says: what a person must know while a call hangs. */
void host_notice(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Bounded appending to a text: `at` is where it ends now. */
struct host_text {
    char *buffer;
    size_t size;
    size_t at;
};
void host_text_add(struct host_text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
