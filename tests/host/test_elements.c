/* The arithmetic of single elements against reference.h: conversions, float8 and special values exhaustively,
 * the rest on random patterns; on every table of loops this machine can run.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "elements.h"
#include "kernels.h"
#include "reference.h"

static const int kinds[] = {HOST_OP_SUM, HOST_OP_PROD, HOST_OP_MAX, HOST_OP_MIN};
static const char *kind_names[] = {"sum", "prod", "max", "min", "avg", "premul"};

/* ---- conversions between floats ---- */

static uint64_t decoded_as_f32(int dtype, uint64_t pattern) {
  return ref_encode(&formats[F32], ref_decode(&formats[dtype], pattern));
}

static void check_widening(int dtype, uint64_t pattern, float got) {
  uint64_t want = decoded_as_f32(dtype, pattern);
  uint32_t bits = f32_bits(got);
  if (want == formats[F32].nan)
    CHECK(got != got, "%s %#llx", formats[dtype].name, (unsigned long long)pattern);
  else
    CHECK(bits == want, "%s %#llx gives %#x, not %#llx", formats[dtype].name,
          (unsigned long long)pattern, bits, (unsigned long long)want);
}

static void check_narrowing(int dtype, uint32_t bits) {
  uint64_t want = ref_encode(&formats[dtype], ref_decode(&formats[F32], bits)), got = 0;
  float x = bits_f32(bits);
  switch (dtype) {
  case F16:
    got = f32_to_f16(x);
    break;
  case B16:
    got = f32_to_b16(x);
    break;
  case E4M3:
    got = f32_to_e4m3(x);
    break;
  default:
    got = f32_to_e5m2(x);
  }
  CHECK(got == want, "float %#x as %s gives %#llx, not %#llx", bits, formats[dtype].name,
        (unsigned long long)got, (unsigned long long)want);
}

/* Every value, every midpoint between neighbours, and one step to either side of each. */
static void check_around(int dtype, uint32_t bits, uint32_t next) {
  uint32_t middle = bits + (next - bits) / 2;
  uint32_t at[] = {bits, bits + 1, bits - 1, middle, middle + 1, middle - 1};
  for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
    check_narrowing(dtype, at[i] & 0x7fffffff);
    check_narrowing(dtype, at[i] | 0x80000000);
  }
}

static void test_conversions(void) {
  static const int small[] = {F16, B16, E4M3, E5M2};
  for (size_t t = 0; t < 4; t++) {
    int dtype = small[t];
    uint64_t count = 1ULL << formats[dtype].bits;
    for (uint64_t p = 0; p < count; p++) {
      float wide = dtype == F16   ? f16_to_f32((uint16_t)p)
                   : dtype == B16 ? b16_to_f32((uint16_t)p)
                   : dtype == E4M3 ? e4m3_to_f32((uint8_t)p)
                                   : e5m2_to_f32((uint8_t)p);
      check_widening(dtype, p, wide);
    }
    for (uint64_t p = 0; p <= formats[dtype].top; p++)
      check_around(dtype, (uint32_t)decoded_as_f32(dtype, p),
                   p < formats[dtype].top ? (uint32_t)decoded_as_f32(dtype, p + 1)
                                          : (uint32_t)decoded_as_f32(dtype, p) + (1u << (23 - formats[dtype].mantissa)));
    uint64_t state = 88172645463325252ULL;
    for (int i = 0; i < 200000; i++)
      check_narrowing(dtype, (uint32_t)(check_random(&state) >> 32));
    static const uint32_t specials[] = {0,          1,          0x007fffff, 0x00800000, 0x7f7fffff,
                                        0x7f800000, 0x7f800001, 0x7fc00000, 0x7fffffff};
    for (size_t i = 0; i < sizeof specials / sizeof specials[0]; i++)
      check_around(dtype, specials[i], specials[i]);
  }
}

/* ---- combinations ---- */

/* Patterns where formats have their corners: zeros, subnormals, one, powers, largest, infinity, NaNs. */
static size_t corners(int dtype, uint64_t *out) {
  const format *f = &formats[dtype];
  size_t n = 0;
  uint64_t sign = 1ULL << (f->bits - 1), all = sign | (sign - 1);
  uint64_t one = f->mantissa ? (uint64_t)f->bias << f->mantissa : 1;
  uint64_t unit = f->mantissa ? 1ULL << f->mantissa : 2;
  uint64_t base[] = {0,       1,        2,        3,       unit - 1,     unit,    unit + 1,
                     one,     one + 1,  one - 1,  one + unit, one - unit, f->top, f->top - 1,
                     f->top + 1, f->top + 2, sign - 1, sign - 2, f->top - unit, one * 3 / 2, one / 2};
  for (size_t i = 0; i < sizeof base / sizeof base[0]; i++) {
    out[n++] = base[i] & all;
    out[n++] = (base[i] ^ sign) & all;
  }
  return n;
}

/* dst = a op b over `count` patterns at once, so that vector loops and tails both see every pair. */
static void check_pairs(const host_kernels *k, int dtype, const uint64_t *a, const uint64_t *b,
                        size_t count) {
  enum { MOST = 8192 };
  static unsigned char x[MOST * 8], y[MOST * 8], z[MOST * 8];
  const void *src[] = {x, y};
  for (size_t i = 0; i < count; i++) {
    ref_put(dtype, x, i, a[i]);
    ref_put(dtype, y, i, b[i]);
  }
  for (size_t o = 0; o < sizeof kinds / sizeof kinds[0]; o++) {
    host_op op = {kinds[o], 2, {0}};
    memset(z, 0xa5, sizeof z);
    host_reduce_on(k, dtype, &op, z, src, 2, count);
    for (size_t i = 0; i < count; i++) {
      uint64_t want = ref_combine(dtype, kinds[o], a[i], b[i]), got = ref_get(dtype, z, i);
      CHECK(got == want, "%s %s(%#llx, %#llx) gives %#llx, not %#llx", formats[dtype].name,
            kind_names[kinds[o]], (unsigned long long)a[i], (unsigned long long)b[i],
            (unsigned long long)got, (unsigned long long)want);
    }
  }
}

static void test_every_float8_pair(const host_kernels *k) {
  for (int dtype = E4M3; dtype <= E5M2; dtype++) {
    for (uint64_t p = 0; p < 256; p++) {
      uint64_t a[256], b[256];
      for (uint64_t q = 0; q < 256; q++) {
        a[q] = p;
        b[q] = q;
      }
      check_pairs(k, dtype, a, b, 256);
    }
  }
}

static void test_every_int8_pair(const host_kernels *k) {
  for (int dtype = I8; dtype <= U8; dtype++) {
    for (uint64_t p = 0; p < 256; p++) {
      uint64_t a[256], b[256];
      for (uint64_t q = 0; q < 256; q++) {
        a[q] = p;
        b[q] = q;
      }
      check_pairs(k, dtype, a, b, 256);
    }
  }
}

static void test_corners(const host_kernels *k) {
  for (int dtype = 0; dtype < HOST_DTYPES; dtype++) {
    uint64_t c[64], a[64 * 64], b[64 * 64];
    size_t n = corners(dtype, c), count = 0;
    for (size_t i = 0; i < n; i++) {
      for (size_t j = 0; j < n; j++) {
        a[count] = c[i];
        b[count++] = c[j];
      }
    }
    check_pairs(k, dtype, a, b, count);
  }
}

/* Random patterns; for floats also pairs of near magnitude, where cancellation and ties happen. */
static void test_random_pairs(const host_kernels *k) {
  enum { COUNT = 4099 };
  static uint64_t a[COUNT], b[COUNT];
  uint64_t state = 0x9e3779b97f4a7c15ULL;
  for (int dtype = 0; dtype < HOST_DTYPES; dtype++) {
    int bits = formats[dtype].bits;
    for (int round = 0; round < 24; round++) {
      for (size_t i = 0; i < COUNT; i++) {
        a[i] = check_random(&state) >> (64 - bits);
        b[i] = check_random(&state) >> (64 - bits);
        if (round % 3 == 1) /* near in magnitude, either sign */
          b[i] = (a[i] ^ (b[i] & 0x1f) ^ (b[i] & 1ULL << (bits - 1)));
        if (round % 3 == 2 && formats[dtype].mantissa) /* few set bits: exact ties */
          a[i] &= ~0ULL << (formats[dtype].mantissa / 2);
      }
      check_pairs(k, dtype, a, b, COUNT);
    }
  }
}

/* ---- scaling ---- */

static void test_scaling(const host_kernels *k) {
  enum { COUNT = 515 };
  static unsigned char x[COUNT * 8 + 8], z[COUNT * 8 + 8];
  uint64_t state = 7;
  for (int dtype = 0; dtype < HOST_DTYPES; dtype++) {
    uint64_t c[64];
    size_t n = corners(dtype, c);
    for (size_t s = 0; s < n; s++) {
      unsigned char scalar[8];
      ref_put(dtype, scalar, 0, c[s]);
      for (size_t i = 0; i < COUNT; i++)
        ref_put(dtype, x, i, i < n ? c[i] : check_random(&state) >> (64 - formats[dtype].bits));
      k->scale[dtype](z, x, scalar, COUNT);
      for (size_t i = 0; i < COUNT; i++) {
        uint64_t from = ref_get(dtype, x, i), got = ref_get(dtype, z, i);
        uint64_t want = ref_combine(dtype, HOST_OP_PROD, from, c[s]);
        CHECK(got == want, "%s %#llx * %#llx gives %#llx, not %#llx", formats[dtype].name,
              (unsigned long long)from, (unsigned long long)c[s], (unsigned long long)got,
              (unsigned long long)want);
      }
    }
  }
}

static void test_average_factors(void) {
  for (int dtype = 0; dtype < HOST_DTYPES; dtype++) {
    for (int n = 1; n <= 3000; n++) {
      host_op op = {HOST_OP_AVG, n, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}};
      host_scale_for_avg(dtype, &op);
      uint64_t want = formats[dtype].mantissa ? ref_reciprocal(dtype, n) : 0;
      uint64_t got = ref_get(dtype, op.scalar, 0);
      CHECK(got == want, "%s 1/%d is %#llx, not %#llx", formats[dtype].name, n,
            (unsigned long long)got, (unsigned long long)want);
    }
  }
}

static void test_integer_quotients(const host_kernels *k) {
  static const unsigned divisors[] = {1,   2,   3,   4,   5,    6,    7,     8,     9,    10,
                                      31,  32,  100, 127, 128,  129,  254,   255,   256,  257,
                                      641, 999, 1024, 4095, 65535, 65536, 65537, 1000003, 0x7fffffff};
  enum { COUNT = 600 };
  static unsigned char x[COUNT * 8];
  uint64_t state = 11;
  for (int dtype = 0; dtype <= U64; dtype++) {
    uint64_t c[64], from[COUNT];
    size_t n = corners(dtype, c);
    for (size_t d = 0; d < sizeof divisors / sizeof divisors[0]; d++) {
      for (size_t i = 0; i < COUNT; i++) {
        uint64_t random = check_random(&state) >> (64 - formats[dtype].bits);
        from[i] = i < n ? c[i] : i < n + 256 ? i - n : random;
        if (i >= n + 256 && i % 2) /* at and beside multiples */
          from[i] = ref_wrap(dtype, (i128)(random / divisors[d] * divisors[d]) - (i % 4 == 1));
        ref_put(dtype, x, i, from[i]);
      }
      k->divide[dtype](x, divisors[d], COUNT);
      for (size_t i = 0; i < COUNT; i++) {
        uint64_t want = ref_divide(dtype, from[i], (int)divisors[d]), got = ref_get(dtype, x, i);
        CHECK(got == want, "%s %#llx / %u gives %#llx, not %#llx", formats[dtype].name,
              (unsigned long long)from[i], divisors[d], (unsigned long long)got,
              (unsigned long long)want);
      }
    }
  }
}

int main(void) {
  const host_kernels *tables[] = {&host_kernels_base, host_kernels_best()};
  int count = tables[1] == tables[0] ? 1 : 2;
  test_conversions();
  test_average_factors();
  for (int t = 0; t < count; t++) {
    test_every_float8_pair(tables[t]);
    test_every_int8_pair(tables[t]);
    test_corners(tables[t]);
    test_random_pairs(tables[t]);
    test_scaling(tables[t]);
    test_integer_quotients(tables[t]);
  }
  return FINISH();
}
