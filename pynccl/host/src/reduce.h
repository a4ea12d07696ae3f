/* Element-wise reductions of the host library: 12 element types x 6 operators.
 *
 * The arithmetic is NCCL's (ring precision): sources are combined in the order 0..n-1 with one rounding to
 * the element type per combination, integers wrap, an integer average is the wrapped sum divided toward
 * zero, max and min drop NaN, and fp8 is combined in half precision and saturates to the largest finite
 * value. The result depends on the values and their order only: not on count, alignment, instruction set,
 * aliasing or the caller's floating-point mode. So ranks that each reduce for themselves agree to the bit;
 * to keep that true, a combination that yields NaN yields one fixed NaN per type (sign 0, all other bits 1).
 *
 * No locks, no allocation, nothing remembered between calls: every function may be called from any thread at any time.
 * `dtype` is an ncclDataType_t code, already checked by the caller.
 */
#ifndef PYNCCL_HOST_REDUCE_H
#define PYNCCL_HOST_REDUCE_H

#include <stddef.h>
#include <stdint.h>

enum { HOST_DTYPES = 12 };

/* The first five are ncclRedOp_t's own codes. */
enum { HOST_OP_SUM, HOST_OP_PROD, HOST_OP_MAX, HOST_OP_MIN, HOST_OP_AVG, HOST_OP_PREMUL };

typedef struct host_op {
  int kind;
  int nranks;        /* AVG's divisor; unused by the others */
  uint8_t scalar[8]; /* PREMUL, AVG over floats: one element of the dtype, this rank's own */
} host_op;

/* Bytes of one element. */
size_t host_dtype_size(int dtype);

/* dst[i] = src[0][i] (op) src[1][i] (op) ... src[n-1][i], n >= 1.
 * dst may be exactly any of the sources but must not overlap one partly; no pointer needs alignment.
 * PREMUL, and AVG over floats, sum sources to which host_reduce_scale was applied before.
 * AVG over integers divides at the end, so it needs the sources of all ranks in one call. */
void host_reduce(int dtype, const host_op *op, void *dst, const void *const *src, int n, size_t count);

/* Non-zero if a rank's own input must pass through host_reduce_scale before it is combined. */
int host_reduce_needs_scale(int dtype, const host_op *op);

/* dst[i] = src[i] * op->scalar, rounded in the dtype (integers modulo 2^bits). dst may be src. */
void host_reduce_scale(int dtype, const host_op *op, void *dst, const void *src, size_t count);

/* Fill op->scalar of an AVG for `dtype`: 1/nranks as NCCL rounds it (from float, for double exactly once).
 * Integers have no scalar and get 0. */
void host_scale_for_avg(int dtype, host_op *op);

#endif
