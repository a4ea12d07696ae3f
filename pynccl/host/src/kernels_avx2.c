/* The loops for x86-64 with AVX2 and F16C, chosen at run time (host_kernels_best).
 *
 * Integers, float and double: the common template, compiled for 32-byte vectors.
 * half, bfloat16 and float8: eight lanes at a time. The F16C instructions convert, rounding to nearest even by
 * themselves; P_load and P_keep are elements.h's wide and round, P_store is narrow. A tail shorter than
 * eight goes through elements.h.
 * Constant data only, no locks.
 */
#if defined(__x86_64__)

#include <immintrin.h>

#define HOST_ISA __attribute__((target("avx2,f16c")))
#define HOST_TABLE host_kernels_avx2

#define LANES 8
#define STEP HOST_ISA static inline __attribute__((always_inline))

STEP __m128i to_half(__m256 x) {
  return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* `value` where the half is NaN. */
STEP __m128i if_nan(__m128i half, __m128i code, short value) {
  __m128i a = _mm_and_si128(half, _mm_set1_epi16(0x7fff));
  __m128i nan = _mm_cmpgt_epi16(a, _mm_set1_epi16(0x7c00));
  return _mm_blendv_epi8(code, _mm_set1_epi16(value), nan);
}

STEP void store_bytes(void *p, __m128i codes) {
  _mm_storel_epi64(p, _mm_packus_epi16(codes, codes));
}

/* ---- half ---- */

STEP __m256 f16_load(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
STEP __m256 f16_keep(__m256 x) { return _mm256_cvtph_ps(to_half(x)); }
STEP void f16_store(void *p, __m256 x) {
  __m128i h = to_half(x);
  _mm_storeu_si128(p, if_nan(h, h, 0x7fff));
}

/* ---- bfloat16: the upper half of a float ---- */

STEP __m256 b16_load(const void *p) {
  __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
}

/* The rounded code in the upper half of each lane, something in the lower half. */
STEP __m256i b16_code(__m256 x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fffffff), nan);
}

STEP __m256 b16_keep(__m256 x) {
  return _mm256_castsi256_ps(_mm256_and_si256(b16_code(x), _mm256_set1_epi32((int)0xffff0000)));
}

STEP void b16_store(void *p, __m256 x) {
  __m256i codes = _mm256_srli_epi32(b16_code(x), 16);
  __m128i high = _mm256_extracti128_si256(codes, 1);
  _mm_storeu_si128(p, _mm_packus_epi32(_mm256_castsi256_si128(codes), high));
}

/* ---- e5m2: the upper byte of a half ---- */

STEP __m256 e5m2_load(const void *p) {
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(p)), 8));
}

STEP __m128i e5m2_code(__m256 x) {
  __m128i h = to_half(x);
  __m128i a = _mm_and_si128(h, _mm_set1_epi16(0x7fff));
  __m128i sign = _mm_and_si128(_mm_srli_epi16(h, 8), _mm_set1_epi16(0x80));
  __m128i odd = _mm_and_si128(_mm_srli_epi16(a, 8), _mm_set1_epi16(1));
  __m128i r = _mm_srli_epi16(_mm_add_epi16(_mm_add_epi16(a, _mm_set1_epi16(0x7f)), odd), 8);
  r = _mm_or_si128(_mm_min_epi16(r, _mm_set1_epi16(0x7b)), sign);
  return if_nan(h, r, 0x7f);
}

STEP __m256 e5m2_keep(__m256 x) { return _mm256_cvtph_ps(_mm_slli_epi16(e5m2_code(x), 8)); }
STEP void e5m2_store(void *p, __m256 x) { store_bytes(p, e5m2_code(x)); }

/* ---- e4m3: moved up by 7 bits it is a half that is 2^8 too small, subnormals included ---- */

STEP __m256 e4m3_load(const void *p) {
  __m128i b = _mm_cvtepi8_epi16(_mm_loadl_epi64(p)); /* the sign is extended over bits 7..15 */
  __m128i h = _mm_and_si128(_mm_slli_epi16(b, 7), _mm_set1_epi16((short)0xbf80));
  __m128i a = _mm_and_si128(b, _mm_set1_epi16(0x7f));
  __m128i nan = _mm_srli_epi16(_mm_cmpeq_epi16(a, _mm_set1_epi16(0x7f)), 1);
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(h, nan)), _mm256_set1_ps(256.0f));
}

/* Adding and taking away 2^20 times the number's own power of two leaves it rounded to 4 bits; numbers
 * below 2^-6 are rounded as if they were 2^-6. Operands are ordered so that min and max hand on a NaN. */
STEP __m256 e4m3_keep(__m256 x) {
  const __m256 least = _mm256_set1_ps(0x1p-6f), largest = _mm256_set1_ps(448.0f);
  const __m256 sign_bit = _mm256_set1_ps(-0.0f);
  __m256 sign = _mm256_and_ps(x, sign_bit);
  __m256 a = _mm256_min_ps(largest, _mm256_andnot_ps(sign_bit, x));
  __m256i power = _mm256_castps_si256(_mm256_max_ps(a, least));
  power = _mm256_and_si256(power, _mm256_set1_epi32(0x7f800000));
  __m256 big = _mm256_castsi256_ps(_mm256_add_epi32(power, _mm256_set1_epi32(20 << 23)));
  return _mm256_or_ps(_mm256_sub_ps(_mm256_add_ps(a, big), big), sign);
}

STEP void e4m3_store(void *p, __m256 x) {
  __m128i h = to_half(_mm256_mul_ps(e4m3_keep(x), _mm256_set1_ps(0x1p-8f)));
  __m128i sign = _mm_and_si128(_mm_srli_epi16(h, 8), _mm_set1_epi16(0x80));
  __m128i a = _mm_and_si128(_mm_srli_epi16(h, 7), _mm_set1_epi16(0x7f));
  store_bytes(p, if_nan(h, _mm_or_si128(a, sign), 0x7f));
}

/* ---- loops ---- */

#define LANES_FOLD(P, U, NAME, VECTOR_OP, OP)                                                  \
  HOST_ISA static void NAME(void *dst, const void *const *src, int n, size_t count) {          \
    size_t i = 0;                                                                              \
    U *d = dst;                                                                                \
    const U *s0 = src[0], *s1 = src[1], *s2 = n > 2 ? src[2] : s0, *s3 = n > 3 ? src[3] : s0;  \
    for (; i + LANES <= count; i += LANES) {                                                   \
      __m256 acc = VECTOR_OP(P##_load(s0 + i), P##_load(s1 + i));                              \
      if (n > 2)                                                                               \
        acc = VECTOR_OP(P##_keep(acc), P##_load(s2 + i));                                      \
      if (n > 3)                                                                               \
        acc = VECTOR_OP(P##_keep(acc), P##_load(s3 + i));                                      \
      P##_store(d + i, acc);                                                                   \
    }                                                                                          \
    for (; i < count; i++) {                                                                   \
      float acc = OP(P##_wide(s0[i]), P##_wide(s1[i]));                                        \
      if (n > 2)                                                                               \
        acc = OP(P##_round(acc), P##_wide(s2[i]));                                             \
      if (n > 3)                                                                               \
        acc = OP(P##_round(acc), P##_wide(s3[i]));                                             \
      d[i] = P##_narrow(acc);                                                                  \
    }                                                                                          \
  }

#define LANES_SCALE(P, U)                                                                      \
  HOST_ISA static void P##_scale(void *dst, const void *src, const void *scalar,               \
                                 size_t count) {                                               \
    size_t i = 0;                                                                              \
    U *d = dst;                                                                                \
    const U *s = src;                                                                          \
    float by = P##_wide(*(const U *)scalar);                                                   \
    for (; i + LANES <= count; i += LANES)                                                     \
      P##_store(d + i, _mm256_mul_ps(P##_load(s + i), _mm256_set1_ps(by)));                    \
    for (; i < count; i++)                                                                     \
      d[i] = P##_narrow(P##_wide(s[i]) * by);                                                  \
  }

#define LANES_LOOPS(P, U)                                                                      \
  LANES_FOLD(P, U, P##_fold_sum, _mm256_add_ps, HOST_ADD)                                      \
  LANES_FOLD(P, U, P##_fold_prod, _mm256_mul_ps, HOST_MUL)                                     \
  LANES_SCALE(P, U)

#define HOST_SMALL_FLOAT_LOOPS                                                                 \
  LANES_LOOPS(f16, any16)                                                                      \
  LANES_LOOPS(b16, any16)                                                                      \
  LANES_LOOPS(e4m3, any8)                                                                      \
  LANES_LOOPS(e5m2, any8)

#include "loops.h"

#else
typedef int host_kernels_avx2_is_for_x86_64; /* ISO C wants a declaration in every unit */
#endif
