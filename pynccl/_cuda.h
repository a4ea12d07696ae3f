/* The dozen CUDA driver functions that pynccl needs, without CUDA's headers or libraries.
 *
 * An absent driver is a normal state: every function then says so and changes nothing. Only cuda_open()
 * loads libcuda; the rest use it if it is there already. cuInit is called where a device is counted or made
 * current, not before: a process which only looks at arrays stays safe to fork.
 *
 * Streams are handles as NCCL takes them: 0 and 1 are the legacy default stream, 2 is the thread's own
 * default stream. Results are CUresult values, 0 for success. Any thread may call anything here, without
 * the GIL.
 *
 * Linked into one extension module only, since the driver's table is static state.
 */
#ifndef PYNCCL_CUDA_H
#define PYNCCL_CUDA_H

#include <stddef.h>
#include <stdint.h>

/* 1 if the process can talk to a driver: one is loaded already, or PYNCCL_LIBCUDA names one. */
int cuda_ready(void);

/* Load libcuda.so.1 (or what PYNCCL_LIBCUDA names) if need be; 1 if there is a driver now. */
int cuda_open(void);

/* Where memory is: >= 0 the device, -1 host memory, -2 no driver or no answer. */
int cuda_pointer_device(const void *p);

/* Make what is submitted to consumer from now on wait for what is in producer already. Nothing to do if
 * they are one stream; nothing is done if consumer is being captured, where the wait would become part of
 * the graph. */
int cuda_stream_wait(uintptr_t producer, uintptr_t consumer);

int cuda_stream_sync(uintptr_t stream);

int cuda_device_count(int *count);

/* The calling thread's current device; -1 if no context is current. cuda_set_device(-1) goes back to that.
 * Otherwise cuda_set_device makes the device's primary context current, as the CUDA runtime does. */
int cuda_get_device(int *device);
int cuda_set_device(int device);

/* The same for a stretch of code, exact also where the caller's context is not a primary one:
 * leave restores what enter found. *saved is valid for one leave, in the same thread. */
int cuda_device_enter(int device, void **saved);
int cuda_device_leave(void *saved);

/* Device memory of the current context; cuda_free(NULL) does nothing. */
int cuda_malloc(void **p, size_t nbytes);
int cuda_free(void *p);

/* "invalid argument (CUDA_ERROR_INVALID_VALUE)"; the text is the calling thread's until its next call. */
const char *cuda_error(int code);

#endif /* PYNCCL_CUDA_H */
