/* host_reduce as the engine calls it: every type, operator and number of sources; counts around vector and
 * block sizes, every alignment, dst equal to each source, bytes around dst untouched, inputs left alone, and
 * the same bits under a changed floating-point mode. Expected values come from reference.h.
 */
#include <fenv.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "check.h"
#include "kernels.h"
#include "reference.h"

enum { MOST = 9, COUNT = 4102, GUARD = 64, ROOM = COUNT * 8 + 2 * GUARD };

static const int source_counts[] = {1, 2, 3, 4, 5, 7, 8, 9};
static const char *kind_names[] = {"sum", "prod", "max", "min", "avg", "premul"};

static unsigned char inputs[MOST][ROOM];  /* what the ranks have */
static unsigned char scaled[MOST][ROOM];  /* what they contribute: by the reference */
static unsigned char expected[ROOM];      /* packed */
static unsigned char buffers[MOST + 1][ROOM];

static size_t size_of(int dtype) { return (size_t)formats[dtype].bits / 8; }

/* Mostly moderate numbers, so that sums stay finite; every seventh pattern is arbitrary. */
static void fill_inputs(int dtype, uint64_t seed) {
  const format *f = &formats[dtype];
  uint64_t state = seed;
  for (int r = 0; r < MOST; r++) {
    for (size_t i = 0; i < COUNT; i++) {
      uint64_t pattern = check_random(&state) >> (64 - f->bits);
      if (f->mantissa && i % 7 != 0) {
        uint64_t fraction = pattern & ((1ULL << f->mantissa) - 1);
        uint64_t field = (uint64_t)f->bias - 3 + (check_random(&state) >> 61);
        pattern = (pattern & 1ULL << (f->bits - 1)) | field << f->mantissa | fraction;
      }
      ref_put(dtype, inputs[r], i, pattern);
    }
  }
}

static host_op op_for(int dtype, int kind, int rank, int n) {
  host_op op = {kind, n, {0}};
  if (kind == HOST_OP_AVG)
    host_scale_for_avg(dtype, &op);
  if (kind == HOST_OP_PREMUL) /* another scalar on each rank */
    ref_put(dtype, op.scalar, 0, ref_get(dtype, inputs[rank], 1 + (size_t)rank));
  return op;
}

/* Each rank's own step, and what it must give. */
static void scale_inputs(int dtype, int kind, int n) {
  for (int r = 0; r < n; r++) {
    host_op op = op_for(dtype, kind, r, n);
    int scales = kind == HOST_OP_PREMUL || (kind == HOST_OP_AVG && dtype >= F16 && n > 1);
    CHECK(!!host_reduce_needs_scale(dtype, &op) == scales, "%s %s n=%d", formats[dtype].name,
          kind_names[kind], n);
    memcpy(scaled[r], inputs[r], sizeof scaled[r]);
    if (!scales)
      continue;
    uint64_t by = kind == HOST_OP_AVG ? ref_reciprocal(dtype, n) : ref_get(dtype, op.scalar, 0);
    for (size_t i = 0; i < COUNT; i++)
      ref_put(dtype, scaled[r], i,
              ref_combine(dtype, HOST_OP_PROD, ref_get(dtype, inputs[r], i), by));
    size_t nbytes = COUNT * size_of(dtype);
    host_reduce_scale(dtype, &op, buffers[r] + 1, inputs[r], COUNT); /* unaligned, then in place */
    CHECK(memcmp(buffers[r] + 1, scaled[r], nbytes) == 0, "%s %s", formats[dtype].name,
          kind_names[kind]);
    memcpy(buffers[r], inputs[r], sizeof buffers[r]);
    host_reduce_scale(dtype, &op, buffers[r], buffers[r], COUNT);
    CHECK(memcmp(buffers[r], scaled[r], nbytes) == 0, "%s %s in place", formats[dtype].name,
          kind_names[kind]);
  }
}

static void expect(int dtype, int kind, int n) {
  for (size_t i = 0; i < COUNT; i++) {
    uint64_t acc = ref_get(dtype, scaled[0], i);
    for (int r = 1; r < n; r++)
      acc = ref_combine(dtype, kind, acc, ref_get(dtype, scaled[r], i));
    if (kind == HOST_OP_AVG && dtype <= U64)
      acc = ref_divide(dtype, acc, n);
    ref_put(dtype, expected, i, acc);
  }
}

static int all_bytes(const unsigned char *p, size_t n, unsigned char value) {
  for (size_t i = 0; i < n; i++)
    if (p[i] != value)
      return 0;
  return 1;
}

/* One call. `alias` is the source that dst equals, or -1. Offsets make every pointer differently aligned. */
static void check_call(const host_kernels *k, int dtype, int kind, int n, size_t count, int alias,
                       unsigned shift) {
  size_t nbytes = count * size_of(dtype);
  const void *src[MOST];
  unsigned char *at[MOST + 1];
  for (int r = 0; r <= n; r++) {
    at[r] = buffers[r] + GUARD + (shift * (unsigned)(r + 1) + (unsigned)r * (shift != 0)) % 16;
    memset(at[r] - GUARD / 2, 0xa5, nbytes + GUARD);
    if (r < n)
      memcpy(at[r], scaled[r], nbytes);
    if (r < n)
      src[r] = at[r];
  }
  unsigned char *dst = alias < 0 ? at[n] : at[alias];
  host_op op = op_for(dtype, kind, 0, n);
  if (k)
    host_reduce_on(k, dtype, &op, dst, src, n, count);
  else
    host_reduce(dtype, &op, dst, src, n, count);
  CHECK(memcmp(dst, expected, nbytes) == 0, "%s %s n=%d count=%zu alias=%d shift=%u",
        formats[dtype].name, kind_names[kind], n, count, alias, shift);
  CHECK(all_bytes(dst - GUARD / 2, GUARD / 2, 0xa5) && all_bytes(dst + nbytes, GUARD / 2, 0xa5),
        "bytes around dst: %s %s n=%d count=%zu", formats[dtype].name, kind_names[kind], n, count);
  for (int r = 0; r < n; r++)
    CHECK(r == alias || memcmp(at[r], scaled[r], nbytes) == 0, "source %d changed: %s %s n=%d", r,
          formats[dtype].name, kind_names[kind], n);
}

static void check_counts(const host_kernels *k, int dtype, int kind, int n) {
  size_t block = 4096 / size_of(dtype); /* reduce.c's pieces */
  size_t large[] = {1023, 1024, 1025, block - 1, block, block + 1, block + 5};
  for (size_t count = 0; count <= 70; count++)
    check_call(k, dtype, kind, n, count, (int)(count % (size_t)(n + 1)) - 1, (unsigned)count % 16);
  for (int alias = -1; alias < n; alias++) {
    check_call(k, dtype, kind, n, 37, alias, 0);
    check_call(k, dtype, kind, n, 37, alias, 1);
    for (size_t c = 0; c < sizeof large / sizeof large[0]; c++)
      check_call(k, dtype, kind, n, large[c], alias, (unsigned)(c * 3) % 16);
  }
  check_call(k, dtype, kind, n, COUNT, -1, 0);
}

static void test_grid(void) {
  for (int dtype = 0; dtype < HOST_DTYPES; dtype++) {
    fill_inputs(dtype, 1234567 + (uint64_t)dtype);
    for (int kind = HOST_OP_SUM; kind <= HOST_OP_PREMUL; kind++) {
      for (size_t s = 0; s < sizeof source_counts / sizeof source_counts[0]; s++) {
        int n = source_counts[s];
        scale_inputs(dtype, kind, n);
        expect(dtype, kind, n);
        check_counts(NULL, dtype, kind, n);
        check_counts(&host_kernels_base, dtype, kind, n);
      }
    }
  }
}

/* NaN among four ranks, in each place: max and min look past it, sums and products do not. */
static void test_nan_is_dropped_by_max_and_min(void) {
  static const int floats[] = {F16, F32, F64, B16, E4M3, E5M2};
  for (size_t t = 0; t < sizeof floats / sizeof floats[0]; t++) {
    int dtype = floats[t];
    const format *f = &formats[dtype];
    uint64_t one = (uint64_t)f->bias << f->mantissa, unit = 1ULL << f->mantissa;
    uint64_t values[4] = {one, one + unit, one + unit + unit / 2, one + 2 * unit}; /* 1 2 3 4 */
    for (int place = 0; place < 5; place++) { /* 4: everywhere */
      for (int kind = HOST_OP_SUM; kind <= HOST_OP_MIN; kind++) {
        unsigned char in[4][8], out[8];
        const void *src[4];
        for (int r = 0; r < 4; r++) {
          ref_put(dtype, in[r], 0, place == r || place == 4 ? f->nan : values[r]);
          src[r] = in[r];
        }
        host_op op = {kind, 4, {0}};
        host_reduce(dtype, &op, out, src, 4, 1);
        uint64_t want = f->nan;
        if (place < 4 && kind == HOST_OP_MAX)
          want = values[place == 3 ? 2 : 3];
        if (place < 4 && kind == HOST_OP_MIN)
          want = values[place == 0 ? 1 : 0];
        CHECK(ref_get(dtype, out, 0) == want, "%s %s NaN at %d", f->name, kind_names[kind], place);
      }
    }
  }
}

static void test_known_results(void) {
  int8_t a = 120, b = 100, r8;
  uint16_t h[4] = {0x6800, 0x3c00, 0x3c00, 0x3c00}, r16; /* 2048, 1, 1, 1 */
  const void *bytes[2] = {&a, &b}, *halves[4] = {&h[0], &h[1], &h[2], &h[3]};
  host_op sum = {HOST_OP_SUM, 2, {0}}, avg = {HOST_OP_AVG, 2, {0}};
  host_reduce(I8, &sum, &r8, bytes, 2, 1);
  CHECK(r8 == -36, "120 + 100 wraps to %d", r8);
  a = 100;
  host_reduce(I8, &avg, &r8, bytes, 2, 1);
  CHECK(r8 == -28, "the average of 100 and 100 is %d", r8);
  host_reduce(F16, &sum, &r16, halves, 4, 1);
  CHECK(r16 == 0x6800, "2048 + 1 + 1 + 1 in half is %#x: each 1 is a tie to even", r16);
}

/* A library built with -ffast-math may have left any mode behind: results do not change, the mode stays. */
static void test_floating_point_mode(void) {
  static const int modes[] = {FE_UPWARD, FE_TOWARDZERO};
  for (int dtype = F16; dtype < HOST_DTYPES; dtype++) {
    fill_inputs(dtype, 99);
    for (int kind = HOST_OP_SUM; kind <= HOST_OP_PREMUL; kind++) {
      host_op op = op_for(dtype, kind, 1, 3);
      const void *src[3] = {inputs[0], inputs[1], inputs[2]};
      for (size_t i = 0; i < 64; i++) /* subnormals, which such modes flush */
        ref_put(dtype, inputs[i % 3], i, 1 + i % 3);
      host_reduce(dtype, &op, expected, src, 3, 500);
      host_reduce_scale(dtype, &op, scaled[0], src[0], 500);
      for (size_t m = 0; m < 2; m++) {
        fesetround(modes[m]);
#if defined(__x86_64__)
        _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
        host_op again = op_for(dtype, kind, 1, 3);
        host_reduce(dtype, &again, buffers[0], src, 3, 500);
        host_reduce_scale(dtype, &again, buffers[1], src[0], 500);
        int after = fegetround();
#if defined(__x86_64__)
        CHECK((_mm_getcsr() & 0x8040) == 0x8040, "flush-to-zero was not put back");
        _mm_setcsr(_mm_getcsr() & ~0x8040u);
#endif
        fesetround(FE_TONEAREST);
        CHECK(after == modes[m], "the rounding mode was not put back");
        size_t nbytes = 500 * size_of(dtype);
        CHECK(memcmp(buffers[0], expected, nbytes) == 0, "%s %s", formats[dtype].name,
              kind_names[kind]);
        CHECK(memcmp(buffers[1], scaled[0], nbytes) == 0, "%s %s scaled", formats[dtype].name,
              kind_names[kind]);
      }
    }
  }
}

static void test_sizes(void) {
  for (int dtype = 0; dtype < HOST_DTYPES; dtype++)
    CHECK(host_dtype_size(dtype) == size_of(dtype), "%s", formats[dtype].name);
}

int main(void) {
  test_sizes();
  test_known_results();
  test_nan_is_dropped_by_max_and_min();
  test_grid();
  test_floating_point_mode();
  return FINISH();
}
