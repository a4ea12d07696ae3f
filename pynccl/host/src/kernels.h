/* The table of inner loops behind reduce.c, one per instruction set: same bits from each, different speed.
 * Owned by kernels_base.c (whatever the compiler targets) and kernels_avx2.c (x86-64 with AVX2 and F16C);
 * reduce.c picks one at load time. All are constant data.
 */
#ifndef PYNCCL_HOST_KERNELS_H
#define PYNCCL_HOST_KERNELS_H

#include "reduce.h"

enum { HOST_FOLDS = 4, HOST_FOLD_MAX = 4 }; /* SUM, PROD, MAX, MIN; sources that one fold takes */

/* dst = src[0] op .. op src[n-1], 2 <= n <= HOST_FOLD_MAX; dst may be any src. */
typedef void host_fold(void *dst, const void *const *src, int n, size_t count);

/* dst = src * *scalar; dst may be src. */
typedef void host_scale(void *dst, const void *src, const void *scalar, size_t count);

/* data /= divisor, toward zero; divisor >= 1. */
typedef void host_divide(void *data, unsigned divisor, size_t count);

typedef struct host_kernels {
  host_fold *fold[HOST_DTYPES][HOST_FOLDS];
  host_scale *scale[HOST_DTYPES];
  host_divide *divide[HOST_DTYPES]; /* integers only, else NULL */
} host_kernels;

extern const host_kernels host_kernels_base;
#if defined(__x86_64__)
extern const host_kernels host_kernels_avx2;
#endif

/* The fastest table this machine can run. */
const host_kernels *host_kernels_best(void);

/* host_reduce on a given table, for the tests that compare tables. */
void host_reduce_on(const host_kernels *k, int dtype, const host_op *op, void *dst,
                    const void *const *src, int n, size_t count);

#endif
