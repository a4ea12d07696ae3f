/* The loops over elements.h: a template, included once by each kernels_*.c.
 *
 * The includer defines
 *   HOST_ISA                an attribute for every function, e.g. a target;
 *   HOST_TABLE              the name of the host_kernels table;
 *   HOST_SMALL_FLOAT_LOOPS  (optional) sum, prod and scale loops of its own for the types narrower than float.
 *
 * Aliasing: dst may be one of the sources, at distance 0. Compilers would guard each loop against overlap
 * and fall to a scalar loop exactly for in-place calls; HOST_NO_CARRY tells them no iteration depends on
 * another. Cost: one load per source and one store per element; everything else is hidden behind them for
 * n <= 4 once the data is out of the first-level cache.
 */
#include "elements.h"
#include "kernels.h"

#if defined(__clang__)
#define HOST_NO_CARRY _Pragma("clang loop vectorize(assume_safety)")
#else
#define HOST_NO_CARRY _Pragma("GCC ivdep")
#endif

/* Callers' buffers are of any alignment and of any effective type. */
typedef uint8_t any8 __attribute__((may_alias));
typedef uint16_t any16 __attribute__((may_alias, aligned(1)));
typedef uint32_t any32 __attribute__((may_alias, aligned(1)));
typedef uint64_t any64 __attribute__((may_alias, aligned(1)));

#define HOST_FOLD(NAME, U, WIDE, OP, ROUND, NARROW)                                            \
  HOST_ISA static void NAME(void *dst, const void *const *src, int n, size_t count) {          \
    U *d = dst;                                                                                \
    const U *s0 = src[0], *s1 = src[1];                                                        \
    if (n == 2) {                                                                              \
      HOST_NO_CARRY for (size_t i = 0; i < count; i++)                                         \
        d[i] = NARROW(OP(WIDE(s0[i]), WIDE(s1[i])));                                           \
      return;                                                                                  \
    }                                                                                          \
    const U *s2 = src[2];                                                                      \
    if (n == 3) {                                                                              \
      HOST_NO_CARRY for (size_t i = 0; i < count; i++)                                         \
        d[i] = NARROW(OP(ROUND(OP(WIDE(s0[i]), WIDE(s1[i]))), WIDE(s2[i])));                   \
      return;                                                                                  \
    }                                                                                          \
    const U *s3 = src[3];                                                                      \
    HOST_NO_CARRY for (size_t i = 0; i < count; i++)                                           \
      d[i] = NARROW(OP(ROUND(OP(ROUND(OP(WIDE(s0[i]), WIDE(s1[i]))), WIDE(s2[i]))),            \
                       WIDE(s3[i])));                                                          \
  }

#define HOST_SCALE(P, U)                                                                       \
  HOST_ISA static void P##_scale(void *dst, const void *src, const void *scalar,               \
                                 size_t count) {                                               \
    U *d = dst;                                                                                \
    const U *s = src, by = *(const U *)scalar;                                                 \
    HOST_NO_CARRY for (size_t i = 0; i < count; i++)                                           \
      d[i] = P##_narrow(HOST_MUL(P##_wide(s[i]), P##_wide(by)));                               \
  }

#define HOST_ARITHMETIC_LOOPS(P, U)                                                            \
  HOST_FOLD(P##_fold_sum, U, P##_wide, HOST_ADD, P##_round, P##_narrow)                        \
  HOST_FOLD(P##_fold_prod, U, P##_wide, HOST_MUL, P##_round, P##_narrow)                       \
  HOST_SCALE(P, U)

#define HOST_ORDER_LOOPS(P, U)                                                                 \
  HOST_FOLD(P##_fold_max, U, P##_top_wide, P##_max, , P##_top_narrow)                         \
  HOST_FOLD(P##_fold_min, U, P##_low_wide, P##_min, , P##_low_narrow)

#ifndef HOST_SMALL_FLOAT_LOOPS
#define HOST_SMALL_FLOAT_LOOPS                                                                 \
  HOST_ARITHMETIC_LOOPS(f16, any16)                                                            \
  HOST_ARITHMETIC_LOOPS(b16, any16)                                                            \
  HOST_ARITHMETIC_LOOPS(e4m3, any8)                                                            \
  HOST_ARITHMETIC_LOOPS(e5m2, any8)
#endif

/* Division by a loop-invariant d is multiplication by ceil(2^F / d), exact when F >= bits + log2(d). */
HOST_INLINE uint8_t quotient8(uint8_t x, uint32_t m) { return (uint8_t)(x * m >> 16); }

HOST_INLINE uint32_t quotient32(uint32_t x, uint64_t m) {
  return (uint32_t)(((m >> 32) * x + ((m & 0xffffffff) * x >> 32)) >> 32);
}

/* No 128-bit product to be had portably: the divider, or a shift for the usual powers of two. */
HOST_INLINE uint64_t quotient64(uint64_t x, uint64_t d) { return x / d; }
HOST_INLINE uint64_t shift64(uint64_t x, uint64_t by) { return x >> by; }

/* |x| / d with the sign put back: toward zero, and right for the most negative value. */
#define HOST_SIGNED_QUOTIENT(NAME, OF, U, S, M)                                                \
  HOST_INLINE U NAME(U x, M m) {                                                               \
    U sign = (U)((S)x >> (8 * (int)sizeof(U) - 1));                                            \
    return (U)((OF((U)((x ^ sign) - sign), m) ^ sign) - sign);                                 \
  }
HOST_SIGNED_QUOTIENT(signed_quotient8, quotient8, uint8_t, int8_t, uint32_t)
HOST_SIGNED_QUOTIENT(signed_quotient32, quotient32, uint32_t, int32_t, uint64_t)
HOST_SIGNED_QUOTIENT(signed_quotient64, quotient64, uint64_t, int64_t, uint64_t)
HOST_SIGNED_QUOTIENT(signed_shift64, shift64, uint64_t, int64_t, uint64_t)

#define HOST_EACH(U, F, data, arg, count)                                                      \
  do {                                                                                         \
    U *d_ = (data);                                                                            \
    HOST_NO_CARRY for (size_t i = 0; i < (count); i++) d_[i] = F(d_[i], (arg));                \
  } while (0)

#define HOST_DIVIDE8(P, F)                                                                     \
  HOST_ISA static void P##_divide(void *data, unsigned divisor, size_t count) {                \
    uint32_t m = 65535 / divisor + 1; /* a divisor of more than 8 bits gives 0, as it must */  \
    HOST_EACH(any8, F, data, m, count);                                                        \
  }

#define HOST_DIVIDE32(P, F)                                                                    \
  HOST_ISA static void P##_divide(void *data, unsigned divisor, size_t count) {                \
    if (divisor == 1)                                                                          \
      return; /* 2^64 / 1 does not fit */                                                      \
    uint64_t m = UINT64_MAX / divisor + 1;                                                     \
    HOST_EACH(any32, F, data, m, count);                                                       \
  }

#define HOST_DIVIDE64(P, F, SHIFT)                                                             \
  HOST_ISA static void P##_divide(void *data, unsigned divisor, size_t count) {                \
    if ((divisor & (divisor - 1)) == 0) {                                                      \
      uint64_t by = (uint64_t)__builtin_ctz(divisor);                                          \
      HOST_EACH(any64, SHIFT, data, by, count);                                                \
    } else {                                                                                   \
      HOST_EACH(any64, F, data, divisor, count);                                               \
    }                                                                                          \
  }

HOST_DIVIDE8(i8, signed_quotient8)
HOST_DIVIDE8(u8, quotient8)
HOST_DIVIDE32(i32, signed_quotient32)
HOST_DIVIDE32(u32, quotient32)
HOST_DIVIDE64(i64, signed_quotient64, signed_shift64)
HOST_DIVIDE64(u64, quotient64, shift64)

/* Sum, product and scaling of signed and unsigned integers are the same loops. */
HOST_ARITHMETIC_LOOPS(u8, any8)
HOST_ARITHMETIC_LOOPS(u32, any32)
HOST_ARITHMETIC_LOOPS(u64, any64)
HOST_ARITHMETIC_LOOPS(f32, any32)
HOST_ARITHMETIC_LOOPS(f64, any64)
HOST_SMALL_FLOAT_LOOPS

HOST_ORDER_LOOPS(i8, any8)
HOST_ORDER_LOOPS(u8, any8)
HOST_ORDER_LOOPS(i32, any32)
HOST_ORDER_LOOPS(u32, any32)
HOST_ORDER_LOOPS(i64, any64)
HOST_ORDER_LOOPS(u64, any64)
HOST_ORDER_LOOPS(f16, any16)
HOST_ORDER_LOOPS(b16, any16)
HOST_ORDER_LOOPS(f32, any32)
HOST_ORDER_LOOPS(f64, any64)
HOST_ORDER_LOOPS(e4m3, any8)
HOST_ORDER_LOOPS(e5m2, any8)

/* In the order of ncclDataType_t; reduce.c asserts it. */
#define HOST_ROW(SUM, ORDER) {SUM##_fold_sum, SUM##_fold_prod, ORDER##_fold_max, ORDER##_fold_min}
const host_kernels HOST_TABLE = {
    .fold = {HOST_ROW(u8, i8), HOST_ROW(u8, u8), HOST_ROW(u32, i32), HOST_ROW(u32, u32),
             HOST_ROW(u64, i64), HOST_ROW(u64, u64), HOST_ROW(f16, f16), HOST_ROW(f32, f32),
             HOST_ROW(f64, f64), HOST_ROW(b16, b16), HOST_ROW(e4m3, e4m3), HOST_ROW(e5m2, e5m2)},
    .scale = {u8_scale, u8_scale, u32_scale, u32_scale, u64_scale, u64_scale, f16_scale,
              f32_scale, f64_scale, b16_scale, e4m3_scale, e5m2_scale},
    .divide = {i8_divide, u8_divide, i32_divide, u32_divide, i64_divide, u64_divide},
};
