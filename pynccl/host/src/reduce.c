/* Reductions, above the loops: which loop, in which order, in pieces that stay in the cache.
 *
 * Folds take up to four sources. More sources go through a block on the stack, four at a time and then
 * three more each: ((s0 s1 s2 s3) s4 s5 s6) ..., still the order 0..n-1. The last fold of a block writes
 * dst, after every source of that block has been read, so dst may be any of them.
 *
 * Floating-point mode: the thread may run with flush-to-zero or another rounding (a library built with
 * -ffast-math sets it for the whole process), which would give this rank other bits than its peers. The
 * mode is set to the default for the time of the loops and put back.
 *
 * The only state is the table of loops, chosen while the library is loaded. No locks. See reduce.h for what
 * is promised.
 */
#include "reduce.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#else
#include <fenv.h>
#endif

#include "elements.h"
#include "kernels.h"

enum { BLOCK = 4096 }; /* bytes; with four source blocks well inside a first-level cache */

/* ncclDataType_t's order, on which the tables here and in loops.h rely. */
enum { I8, U8, I32, U32, I64, U64, F16, F32, F64, B16, E4M3, E5M2 };
_Static_assert(E5M2 + 1 == HOST_DTYPES, "one row per type");

static const uint8_t sizes[HOST_DTYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

static int is_integer(int dtype) { return dtype <= U64; }

size_t host_dtype_size(int dtype) { return sizes[dtype]; }

/* ---- floating-point mode ---- */

#if defined(__x86_64__)
typedef unsigned fp_mode;
enum { MXCSR_DEFAULT = 0x1f80, MXCSR_FLAGS = 0x3f };

static fp_mode fp_enter(void) {
  fp_mode was = _mm_getcsr();
  if ((was & ~(unsigned)MXCSR_FLAGS) != MXCSR_DEFAULT)
    _mm_setcsr(MXCSR_DEFAULT);
  return was;
}

static void fp_leave(fp_mode was) {
  if ((was & ~(unsigned)MXCSR_FLAGS) != MXCSR_DEFAULT)
    _mm_setcsr(was);
}
#else
typedef fenv_t fp_mode;

static fp_mode fp_enter(void) {
  fenv_t was;
  fegetenv(&was);
  fesetenv(FE_DFL_ENV);
  return was;
}

static void fp_leave(fp_mode was) { fesetenv(&was); }
#endif

/* ---- which loops ---- */

static const host_kernels *best = &host_kernels_base;

const host_kernels *host_kernels_best(void) { return best; }

#if defined(__x86_64__)
/* Once, while the library is loaded: CPUID is slow on virtual machines. __builtin_cpu_supports also asks
 * whether the system saves the wide registers; not every compiler lets it be asked for F16C. */
__attribute__((constructor)) static void choose_kernels(void) {
  unsigned eax, ebx, ecx = 0, edx;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C))
    best = &host_kernels_avx2;
}
#endif

static int fold_of(int kind) {
  switch (kind) {
  case HOST_OP_PROD:
    return 1;
  case HOST_OP_MAX:
    return 2;
  case HOST_OP_MIN:
    return 3;
  default: /* AVG and PREMUL are sums of scaled inputs, or sums divided afterwards */
    return 0;
  }
}

/* ---- reduction ---- */

static const void *at(const void *p, size_t offset) { return (const char *)p + offset; }

/* One block, any n >= 2. `acc` is used when the sources do not fit into one fold. */
static void fold_block(host_fold *fold, void *dst, const void *const *src, int n, size_t offset,
                       size_t count, void *acc) {
  const void *part[HOST_FOLD_MAX];
  int have = 0;
  for (int next = 0; next < n;) {
    while (have < HOST_FOLD_MAX && next < n)
      part[have++] = at(src[next++], offset);
    fold(next == n ? dst : acc, part, have, count);
    part[0] = acc;
    have = 1;
  }
}

void host_reduce_on(const host_kernels *k, int dtype, const host_op *op, void *dst,
                    const void *const *src, int n, size_t count) {
  host_fold *fold = k->fold[dtype][fold_of(op->kind)];
  int divides = op->kind == HOST_OP_AVG && is_integer(dtype);
  size_t size = sizes[dtype];
  if (n <= HOST_FOLD_MAX && n > 1 && !divides) {
    fold(dst, src, n, count);
    return;
  }
  if (n == 1 && dst != src[0])
    memmove(dst, src[0], count * size);
  if (n == 1 && !divides)
    return;
  uint64_t acc[BLOCK / sizeof(uint64_t)];
  for (size_t done = 0, step; done < count; done += step) {
    step = count - done < BLOCK / size ? count - done : BLOCK / size;
    char *out = (char *)dst + done * size;
    if (n > 1)
      fold_block(fold, out, src, n, done * size, step, acc);
    if (divides)
      k->divide[dtype](out, (unsigned)op->nranks, step);
  }
}

void host_reduce(int dtype, const host_op *op, void *dst, const void *const *src, int n, size_t count) {
  fp_mode was = fp_enter();
  host_reduce_on(host_kernels_best(), dtype, op, dst, src, n, count);
  fp_leave(was);
}

/* ---- scaling ---- */

int host_reduce_needs_scale(int dtype, const host_op *op) {
  if (op->kind == HOST_OP_PREMUL)
    return 1;
  /* alone, 1/n is 1; multiplying would only change NaN payloads and float8 infinities */
  return op->kind == HOST_OP_AVG && !is_integer(dtype) && op->nranks > 1;
}

void host_reduce_scale(int dtype, const host_op *op, void *dst, const void *src, size_t count) {
  fp_mode was = fp_enter();
  host_kernels_best()->scale[dtype](dst, src, op->scalar, count);
  fp_leave(was);
}

void host_scale_for_avg(int dtype, host_op *op) {
  fp_mode was = fp_enter();
  double exact = 1.0 / op->nranks;
  float narrow = (float)exact;
  uint16_t code = 0;
  memset(op->scalar, 0, sizeof op->scalar);
  switch (dtype) {
  case F64:
    memcpy(op->scalar, &exact, sizeof exact);
    break;
  case F32:
    memcpy(op->scalar, &narrow, sizeof narrow);
    break;
  case F16:
    code = f32_to_f16(narrow);
    break;
  case B16:
    code = f32_to_b16(narrow);
    break;
  case E4M3:
    op->scalar[0] = f32_to_e4m3(narrow);
    break;
  case E5M2:
    op->scalar[0] = f32_to_e5m2(narrow);
    break;
  default:
    break;
  }
  if (sizes[dtype] == 2)
    memcpy(op->scalar, &code, sizeof code);
  fp_leave(was);
}
