/* A CUDA driver of one device that knows every pointer, for peers that ask the driver about their arguments.
 *
 * Owns nothing and does nothing: each function that is not written out here succeeds without an effect.
 * Enough for nccl4py's array interface (through cuda-core); built by null_libraries.py.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))

enum { MEMORY_TYPE = 2, DEVICE_ORDINAL = 9, MEMORY_TYPE_DEVICE = 2 };

EXPORT int cuInit(unsigned flags) { return (void)flags, 0; }
EXPORT int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
EXPORT int cuDeviceGetCount(int *count) { return *count = 1, 0; }
EXPORT int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
EXPORT int cuCtxGetCurrent(void **context) { return *context = (void *)16, 0; }
EXPORT int cuCtxGetDevice(int *device) { return *device = 0, 0; }

EXPORT int cuPointerGetAttribute(void *answer, int attribute, unsigned long long pointer) {
    (void)pointer;
    if (attribute == MEMORY_TYPE)
        *(unsigned *)answer = MEMORY_TYPE_DEVICE;
    else if (attribute == DEVICE_ORDINAL)
        *(int *)answer = 0;
    else
        *(void **)answer = NULL;
    return 0;
}

EXPORT int cuPointerGetAttributes(
    unsigned count, int *attributes, void **answers, unsigned long long pointer
) {
    for (unsigned i = 0; i < count; i++)
        cuPointerGetAttribute(answers[i], attributes[i], pointer);
    return 0;
}

static int succeeds(void) { return 0; }

EXPORT int cuGetProcAddress_v2(
    const char *symbol, void **function, int version, unsigned long long flags, int *status
) {
    (void)version, (void)flags;
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", symbol);
    *function = dlsym(RTLD_DEFAULT, versioned);
    if (!*function)
        *function = dlsym(RTLD_DEFAULT, symbol);
    if (!*function)
        *(int (**)(void))function = succeeds;
    if (status)
        *status = 0;
    return 0;
}

EXPORT int cuGetProcAddress(const char *symbol, void **function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
