/* The arithmetic of single elements: what "a + b" means for each of the 12 types.
 *
 * A type P is described by three functions, and a combination of n elements is
 *     narrow(op(round(op(wide(s0), wide(s1))), wide(s2))) ...
 *   P_wide    a stored pattern as a value to compute with (exact);
 *   P_round   the result of one operation, rounded to what the type can hold;
 *   P_narrow  the same rounding, as a pattern to store; a NaN becomes the type's one NaN.
 * op is HOST_ADD or HOST_MUL. For max and min the same three are called P_top_... and P_low_..., the value is
 * an integer key, and op is P_max or P_min.
 *
 * Everything works on bit patterns (uint8_t..uint64_t) so that one loop template serves all types, and is
 * free of branches, table look-ups and undefined behaviour so that compilers turn the loops into vectors.
 * kernels_avx2.c replaces some of it by intrinsics; these functions remain the definition (and its tails).
 *
 * half, bfloat16: the operation is done in float and rounded once more. That equals one correct rounding:
 * float's 24-bit significand is at least twice theirs plus 2 (2*11+2, 2*8+2), and bfloat16 products too
 * small for float to hold exactly are below half of bfloat16's least value.
 * float8: a GPU widens both operands to half, lets the half operation round, and rounds that to float8,
 * saturating; for max and min too, where it only turns an infinity into the largest number. Two roundings,
 * but for operands of 3 or 4 bits the first never changes the outcome (the tests go through all pairs and
 * do take it), so here it is one.
 *
 * Must be compiled with -ffp-contract=off and without -ffast-math.
 */
#ifndef PYNCCL_HOST_ELEMENTS_H
#define PYNCCL_HOST_ELEMENTS_H

#include <stdint.h>
#include <string.h>

#ifdef __FAST_MATH__
#error "the kernels need IEEE arithmetic"
#endif

#define HOST_INLINE static inline __attribute__((always_inline))

HOST_INLINE uint32_t f32_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

HOST_INLINE float bits_f32(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

HOST_INLINE uint64_t f64_bits(double x) {
  uint64_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

HOST_INLINE double bits_f64(uint64_t u) {
  double x;
  memcpy(&x, &u, sizeof x);
  return x;
}

/* ---- conversions ---- */

/* A float's exponent field of the value 2^e. */
#define F32_EXP(e) ((uint32_t)(127 + (e)) << 23)

/* Subnormals: 2^-14 * (1 + m) - 2^-14 is exact, and needs no normalisation loop. */
HOST_INLINE float f16_to_f32(uint16_t h) {
  int32_t a = (int32_t)(h & 0x7fff) << 13;
  uint32_t sign = (uint32_t)(h & 0x8000) << 16;
  uint32_t tiny = f32_bits(bits_f32((uint32_t)a + F32_EXP(-14)) - bits_f32(F32_EXP(-14)));
  uint32_t r = (uint32_t)a + ((127u - 15) << 23);
  r = a >= (31 << 23) ? (uint32_t)a + ((255u - 31) << 23) : r; /* infinity, NaN */
  r = a < (1 << 23) ? tiny : r;
  return bits_f32(r | sign);
}

/* Adding 2^k to a small number makes the hardware round it at 2^(k-23), to nearest even. */
HOST_INLINE uint16_t f32_to_f16(float x) {
  uint32_t u = f32_bits(x);
  int32_t a = (int32_t)(u & 0x7fffffff);
  uint32_t sign = (u >> 16) & 0x8000;
  uint32_t tiny = f32_bits(bits_f32((uint32_t)a) + bits_f32(F32_EXP(-1))) - F32_EXP(-1);
  uint32_t r = ((uint32_t)a - ((127u - 15) << 23) + 0xfff + ((uint32_t)a >> 13 & 1)) >> 13;
  r = a >= (int32_t)F32_EXP(16) ? 0x7c00 : r; /* from 65520 the carry makes 0x7c00 by itself */
  r = a < (int32_t)F32_EXP(-14) ? tiny : r;
  r = a > 0x7f800000 ? 0x7fff : r | sign;
  return (uint16_t)r;
}

HOST_INLINE float b16_to_f32(uint16_t b) { return bits_f32((uint32_t)b << 16); }

HOST_INLINE uint16_t f32_to_b16(float x) {
  uint32_t u = f32_bits(x);
  uint32_t r = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return (uint16_t)((int32_t)(u & 0x7fffffff) > 0x7f800000 ? 0x7fff : r);
}

HOST_INLINE float e4m3_to_f32(uint8_t e) {
  int32_t a = (int32_t)(e & 0x7f) << 20;
  uint32_t sign = (uint32_t)(e & 0x80) << 24;
  uint32_t tiny = f32_bits(bits_f32((uint32_t)a + F32_EXP(-6)) - bits_f32(F32_EXP(-6)));
  uint32_t r = (uint32_t)a + ((127u - 7) << 23);
  r = a < (1 << 23) ? tiny : r;
  r = a == (0x7f << 20) ? 0x7fffffff : r; /* the only NaN; there is no infinity */
  return bits_f32(r | sign);
}

/* Saturating, from any float. */
HOST_INLINE uint8_t f32_to_e4m3(float x) {
  uint32_t u = f32_bits(x);
  int32_t a = (int32_t)(u & 0x7fffffff);
  uint32_t sign = (u >> 24) & 0x80;
  uint32_t tiny = f32_bits(bits_f32((uint32_t)a) + bits_f32(F32_EXP(14))) - F32_EXP(14);
  uint32_t big = ((uint32_t)a - ((127u - 7) << 23) + 0x7ffff + ((uint32_t)a >> 20 & 1)) >> 20;
  int32_t r = (int32_t)(a < (int32_t)F32_EXP(-6) ? tiny : big);
  r = r > 0x7e ? 0x7e : r;
  return (uint8_t)(a > 0x7f800000 ? 0x7f : (uint32_t)r | sign);
}

HOST_INLINE float e5m2_to_f32(uint8_t e) { return f16_to_f32((uint16_t)(e << 8)); }

HOST_INLINE uint8_t f32_to_e5m2(float x) {
  uint32_t u = f32_bits(x);
  int32_t a = (int32_t)(u & 0x7fffffff);
  uint32_t sign = (u >> 24) & 0x80;
  uint32_t tiny = f32_bits(bits_f32((uint32_t)a) + bits_f32(F32_EXP(7))) - F32_EXP(7);
  uint32_t big = ((uint32_t)a - ((127u - 15) << 23) + 0xfffff + ((uint32_t)a >> 21 & 1)) >> 21;
  int32_t r = (int32_t)(a < (int32_t)F32_EXP(-14) ? tiny : big);
  r = r > 0x7b ? 0x7b : r;
  return (uint8_t)(a > 0x7f800000 ? 0x7f : (uint32_t)r | sign);
}

/* ---- sum and product: op on the wide values, then one rounding ---- */

#define HOST_ADD(a, b) ((a) + (b))
#define HOST_MUL(a, b) ((a) * (b))

#define HOST_ARITHMETIC(P, U, W, WIDE, ROUND, NARROW)                                          \
  HOST_INLINE W P##_wide(U a) { return WIDE(a); }                                              \
  HOST_INLINE W P##_round(W x) { return ROUND(x); }                                            \
  HOST_INLINE U P##_narrow(W x) { return NARROW(x); }

#define SETTLED32(x) ((x) == (x) ? f32_bits(x) : 0x7fffffff)
#define SETTLED64(x) ((x) == (x) ? f64_bits(x) : 0x7fffffffffffffff)
#define ROUND_F16(x) f16_to_f32(f32_to_f16(x))
#define ROUND_B16(x) b16_to_f32(f32_to_b16(x))
#define ROUND_E4M3(x) e4m3_to_f32(f32_to_e4m3(x))
#define ROUND_E5M2(x) e5m2_to_f32(f32_to_e5m2(x))

/* Integers are modulo 2^bits, so signed types use the unsigned functions. */
HOST_ARITHMETIC(u8, uint8_t, uint8_t, , , )
HOST_ARITHMETIC(u32, uint32_t, uint32_t, , , )
HOST_ARITHMETIC(u64, uint64_t, uint64_t, , , )
HOST_ARITHMETIC(f32, uint32_t, float, bits_f32, , SETTLED32)
HOST_ARITHMETIC(f64, uint64_t, double, bits_f64, , SETTLED64)
HOST_ARITHMETIC(f16, uint16_t, float, f16_to_f32, ROUND_F16, f32_to_f16)
HOST_ARITHMETIC(b16, uint16_t, float, b16_to_f32, ROUND_B16, f32_to_b16)
HOST_ARITHMETIC(e4m3, uint8_t, float, e4m3_to_f32, ROUND_E4M3, f32_to_e4m3)
HOST_ARITHMETIC(e5m2, uint8_t, float, e5m2_to_f32, ROUND_E5M2, f32_to_e5m2)

/* ---- max and min: a pattern becomes a signed integer of the same order ----
 * For floats -0 lies just below +0, and the way back takes the same steps. NaN becomes the end of the range
 * that loses; if it wins all the same, every operand was NaN. */

#define HOST_KEYS(P, S)                                                                        \
  HOST_INLINE S P##_max(S a, S b) { return a > b ? a : b; }                                    \
  HOST_INLINE S P##_min(S a, S b) { return a < b ? a : b; }

#define HOST_FLOAT_ORDER(P, U, S, INF, LOW, HIGH, SETTLE)                                      \
  HOST_KEYS(P, S)                                                                              \
  HOST_INLINE S P##_flip(U a) {                                                                \
    return (S)(a ^ ((U)((S)a >> (8 * (int)sizeof(U) - 1)) & HIGH));                            \
  }                                                                                            \
  HOST_INLINE S P##_top_wide(U a) { return (S)(a & HIGH) > INF ? LOW : P##_flip(a); }          \
  HOST_INLINE S P##_low_wide(U a) { return (S)(a & HIGH) > INF ? HIGH : P##_flip(a); }         \
  HOST_INLINE U P##_top_narrow(S m) { return m == LOW ? HIGH : SETTLE((U)P##_flip((U)m)); }    \
  HOST_INLINE U P##_low_narrow(S m) { return m == HIGH ? HIGH : SETTLE((U)P##_flip((U)m)); }

/* float8 passes through half and saturates: only e5m2 has an infinity to lose */
HOST_INLINE uint8_t e5m2_finite(uint8_t a) { return (uint8_t)((a & 0x7f) == 0x7c ? a - 1 : a); }

HOST_FLOAT_ORDER(f32, uint32_t, int32_t, 0x7f800000, INT32_MIN, INT32_MAX, )
HOST_FLOAT_ORDER(f64, uint64_t, int64_t, 0x7ff0000000000000, INT64_MIN, INT64_MAX, )
HOST_FLOAT_ORDER(f16, uint16_t, int16_t, 0x7c00, INT16_MIN, INT16_MAX, )
HOST_FLOAT_ORDER(b16, uint16_t, int16_t, 0x7f80, INT16_MIN, INT16_MAX, )
HOST_FLOAT_ORDER(e4m3, uint8_t, int8_t, 0x7e, INT8_MIN, INT8_MAX, )
HOST_FLOAT_ORDER(e5m2, uint8_t, int8_t, 0x7c, INT8_MIN, INT8_MAX, e5m2_finite)

#define HOST_INTEGER_ORDER(P, U, C)                                                            \
  HOST_KEYS(P, C)                                                                              \
  HOST_INLINE C P##_top_wide(U a) { return (C)a; }                                             \
  HOST_INLINE C P##_low_wide(U a) { return (C)a; }                                             \
  HOST_INLINE U P##_top_narrow(C a) { return (U)a; }                                           \
  HOST_INLINE U P##_low_narrow(C a) { return (U)a; }

HOST_INTEGER_ORDER(i8, uint8_t, int8_t)
HOST_INTEGER_ORDER(u8, uint8_t, uint8_t)
HOST_INTEGER_ORDER(i32, uint32_t, int32_t)
HOST_INTEGER_ORDER(u32, uint32_t, uint32_t)
HOST_INTEGER_ORDER(i64, uint64_t, int64_t)
HOST_INTEGER_ORDER(u64, uint64_t, uint64_t)

#endif
