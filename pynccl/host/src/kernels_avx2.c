/* The loops for x86-64 with AVX2 and F16C, chosen at run time (host_kernels_best).
 *
 * Integers, bfloat16, float and double: the common template, compiled for 32-byte vectors.
 * half and float8: eight lanes at a time, converted by the F16C instructions, which round to nearest even
 * by themselves. A type is described by four steps:
 *     load    8 elements -> 8 codes of 16 bits          to_f32   codes -> floats (exact)
 *     code    floats -> codes, rounded as elements.h    store    8 codes -> 8 elements
 * and a combination is code(to_f32(acc) op to_f32(next)). The tail shorter than 8 goes through elements.h.
 * Constant data only, no locks.
 */
#if defined(__x86_64__)

#include <immintrin.h>

#define HOST_ISA __attribute__((target("avx2,f16c")))
#define HOST_TABLE host_kernels_avx2

#define LANES 8
#define STEP HOST_ISA static inline __attribute__((always_inline))

STEP __m128i load16(const void *p) { return _mm_loadu_si128(p); }
STEP void store16(void *p, __m128i codes) { _mm_storeu_si128(p, codes); }
STEP __m128i load8(const void *p) { return _mm_cvtepu8_epi16(_mm_loadl_epi64(p)); }
STEP void store8(void *p, __m128i codes) { _mm_storel_epi64(p, _mm_packus_epi16(codes, codes)); }

STEP __m128i to_half(__m256 x) {
  return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

STEP __m256 f16_lanes(__m128i codes) { return _mm256_cvtph_ps(codes); }

STEP __m128i f16_code(__m256 x) {
  __m128i h = to_half(x);
  __m128i nan = _mm_cmpgt_epi16(_mm_and_si128(h, _mm_set1_epi16(0x7fff)), _mm_set1_epi16(0x7c00));
  return _mm_blendv_epi8(h, _mm_set1_epi16(0x7fff), nan);
}

/* e5m2 is the upper byte of a half. */
STEP __m256 e5m2_lanes(__m128i codes) { return _mm256_cvtph_ps(_mm_slli_epi16(codes, 8)); }

STEP __m128i e5m2_code(__m256 x) {
  __m128i h = to_half(x);
  __m128i a = _mm_and_si128(h, _mm_set1_epi16(0x7fff));
  __m128i sign = _mm_and_si128(_mm_srli_epi16(h, 8), _mm_set1_epi16(0x80));
  __m128i odd = _mm_and_si128(_mm_srli_epi16(a, 8), _mm_set1_epi16(1));
  __m128i r = _mm_srli_epi16(_mm_add_epi16(_mm_add_epi16(a, _mm_set1_epi16(0x7f)), odd), 8);
  r = _mm_or_si128(_mm_min_epi16(r, _mm_set1_epi16(0x7b)), sign);
  __m128i nan = _mm_cmpgt_epi16(a, _mm_set1_epi16(0x7c00));
  return _mm_blendv_epi8(r, _mm_set1_epi16(0x7f), nan);
}

/* e4m3 moved up by 7 bits is a half that is 2^8 too small, subnormals included. */
STEP __m256 e4m3_lanes(__m128i codes) {
  __m128i a = _mm_and_si128(codes, _mm_set1_epi16(0x7f));
  __m128i sign = _mm_slli_epi16(_mm_and_si128(codes, _mm_set1_epi16(0x80)), 8);
  __m128i nan = _mm_cmpeq_epi16(a, _mm_set1_epi16(0x7f));
  __m128i h = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(a, 7), sign), _mm_srli_epi16(nan, 1));
  return _mm256_mul_ps(_mm256_cvtph_ps(h), _mm256_set1_ps(256.0f));
}

STEP __m128i e4m3_code(__m256 x) {
  const __m256i shift = _mm256_castps_si256(_mm256_set1_ps(0x1p14f));
  __m256 v = _mm256_cvtph_ps(to_half(x));
  __m256i u = _mm256_castps_si256(v);
  __m256i a = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
  __m256i sign = _mm256_and_si256(_mm256_srli_epi32(u, 24), _mm256_set1_epi32(0x80));
  __m256i tiny = _mm256_sub_epi32(
      _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(shift))), shift);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(a, 20), _mm256_set1_epi32(1));
  __m256i big = _mm256_add_epi32(a, _mm256_set1_epi32(0x7ffff - ((127 - 7) << 23)));
  big = _mm256_srli_epi32(_mm256_add_epi32(big, odd), 20);
  __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32((127 - 6) << 23), a);
  __m256i r = _mm256_min_epi32(_mm256_blendv_epi8(big, tiny, small), _mm256_set1_epi32(0x7e));
  r = _mm256_or_si256(r, sign);
  __m256i nan = _mm256_cmpgt_epi32(a, _mm256_set1_epi32(0x7f800000));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7f), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}

#define LANES_FOLD(P, U, LOAD, STORE, OP, VECTOR_OP)                                           \
  HOST_ISA static void P##_fold_##OP(void *dst, const void *const *src, int n, size_t count) { \
    size_t i = 0;                                                                              \
    U *d = dst;                                                                                \
    for (; i + LANES <= count; i += LANES) {                                         \
      __m128i acc = LOAD((const U *)src[0] + i);                                               \
      for (int k = 1; k < n; k++) {                                                            \
        __m128i next = LOAD((const U *)src[k] + i);                                            \
        acc = P##_code(VECTOR_OP(P##_lanes(acc), P##_lanes(next)));                            \
      }                                                                                        \
      STORE(d + i, acc);                                                                       \
    }                                                                                          \
    for (; i < count; i++) {                                                                   \
      U acc = ((const U *)src[0])[i];                                                          \
      for (int k = 1; k < n; k++)                                                              \
        acc = P##_##OP(acc, ((const U *)src[k])[i]);                                           \
      d[i] = acc;                                                                              \
    }                                                                                          \
  }

#define LANES_SCALE(P, U, LOAD, STORE)                                                         \
  HOST_ISA static void P##_scale(void *dst, const void *src, const void *scalar,               \
                                 size_t count) {                                               \
    size_t i = 0;                                                                              \
    U *d = dst;                                                                                \
    const U *s = src, by = *(const U *)scalar;                                                 \
    __m256 factor = P##_lanes(_mm_set1_epi16((short)by));                                      \
    for (; i + LANES <= count; i += LANES)                                           \
      STORE(d + i, P##_code(_mm256_mul_ps(P##_lanes(LOAD(s + i)), factor)));                   \
    for (; i < count; i++)                                                                     \
      d[i] = P##_prod(s[i], by);                                                               \
  }

#define LANES_LOOPS(P, U, LOAD, STORE)                                                         \
  LANES_FOLD(P, U, LOAD, STORE, sum, _mm256_add_ps)                                            \
  LANES_FOLD(P, U, LOAD, STORE, prod, _mm256_mul_ps)                                           \
  LANES_SCALE(P, U, LOAD, STORE)

#define HOST_SMALL_FLOAT_LOOPS                                                                 \
  LANES_LOOPS(f16, any16, load16, store16)                                                     \
  LANES_LOOPS(e4m3, any8, load8, store8)                                                       \
  LANES_LOOPS(e5m2, any8, load8, store8)

#include "loops.h"

#else
typedef int host_kernels_avx2_is_for_x86_64; /* ISO C wants a declaration in every unit */
#endif
