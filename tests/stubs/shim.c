/* A libnccl.so.2 that is the host library behind a mask: everything that NCCL has is passed on, nothing of the
 * host library's own is there, and its ids are not known as such. So the code that speaks to NCCL, with its
 * nonblocking communicators, meets a library that really makes them progress.
 *
 * State: the host library's handle, opened once. SHIM_HOST is its path.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "nccl_abi.h"

static void *host;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void open_host(void) {
    host = dlopen(SHIM_HOST, RTLD_NOW | RTLD_LOCAL);
    if (!host) {
        fprintf(stderr, "shim: %s\n", dlerror());
        abort();
    }
}

__attribute__((unused)) static void *find(const char *name) {
    pthread_once(&once, open_host);
    return dlsym(host, name);
}

/* Turn the host library's mark in an id into something else, and back. */
__attribute__((unused)) static void mask_id(ncclUniqueId *id) {
    id->internal[PYNCCL_HOST_ID_OFFSET] ^= 0x5a;
}

#define SHIM_EXPORT __attribute__((visibility("default")))

#include "shim_calls.h"
