/* The arithmetic of NCCL's reductions, written a second time: slowly, and by other means than the library.
 *
 * A float is taken apart into sign, integer and exponent; sums and products are exact in 128-bit integers
 * (with a sticky bit for what lies far below) and rounded by comparing the remainder with one half. Nothing
 * here uses the floating-point unit. Integers are computed in 128 bits and cut.
 */
#ifndef PYNCCL_TESTS_REFERENCE_H
#define PYNCCL_TESTS_REFERENCE_H

#include <stdint.h>
#include <string.h>

#include "reduce.h"

__extension__ typedef unsigned __int128 u128;
__extension__ typedef __int128 i128;

/* In ncclDataType_t's order. */
enum { I8, U8, I32, U32, I64, U64, F16, F32, F64, B16, E4M3, E5M2 };

typedef struct format {
  const char *name;
  int bits;
  int is_signed; /* integers */
  int mantissa;  /* stored bits; 0 for integers */
  int bias;
  uint64_t top;     /* largest finite magnitude as a pattern */
  uint64_t nan;     /* the NaN that an operation yields */
  int has_infinity; /* top + 1 is infinity; else NaN is the only pattern above top */
  int saturates;
} format;

static const format formats[HOST_DTYPES] = {
    {"int8", 8, 1, 0, 0, 0, 0, 0, 0},
    {"uint8", 8, 0, 0, 0, 0, 0, 0, 0},
    {"int32", 32, 1, 0, 0, 0, 0, 0, 0},
    {"uint32", 32, 0, 0, 0, 0, 0, 0, 0},
    {"int64", 64, 1, 0, 0, 0, 0, 0, 0},
    {"uint64", 64, 0, 0, 0, 0, 0, 0, 0},
    {"float16", 16, 1, 10, 15, 0x7bff, 0x7fff, 1, 0},
    {"float32", 32, 1, 23, 127, 0x7f7fffff, 0x7fffffff, 1, 0},
    {"float64", 64, 1, 52, 1023, 0x7fefffffffffffff, 0x7fffffffffffffff, 1, 0},
    {"bfloat16", 16, 1, 7, 127, 0x7f7f, 0x7fff, 1, 0},
    {"float8_e4m3fn", 8, 1, 3, 7, 0x7e, 0x7f, 0, 1},
    {"float8_e5m2", 8, 1, 2, 15, 0x7b, 0x7f, 1, 1},
};

typedef enum { FINITE, INFINITE, NOT_A_NUMBER } number_class;

/* (-1)^negative * integer * 2^exponent, and "a little more" if sticky. */
typedef struct number {
  number_class is;
  int negative;
  u128 integer;
  int exponent;
  int sticky;
} number;

static number ref_decode(const format *f, uint64_t pattern) {
  uint64_t sign = 1ULL << (f->bits - 1);
  uint64_t magnitude = pattern & (sign - 1);
  uint64_t fraction = magnitude & ((1ULL << f->mantissa) - 1);
  int field = (int)(magnitude >> f->mantissa);
  number x = {FINITE, (pattern & sign) != 0, fraction, 1 - f->bias - f->mantissa, 0};
  if (magnitude > f->top)
    x.is = f->has_infinity && magnitude == f->top + 1 ? INFINITE : NOT_A_NUMBER;
  if (field > 0) {
    x.integer += 1ULL << f->mantissa;
    x.exponent += field - 1;
  }
  return x;
}

static int ref_top_bit(u128 v) {
  int top = -1;
  for (; v; v >>= 1)
    top++;
  return top;
}

/* Round to nearest even. Counting patterns: the next larger float is the next larger pattern. */
static uint64_t ref_encode(const format *f, number x) {
  uint64_t sign = x.negative ? 1ULL << (f->bits - 1) : 0;
  uint64_t beyond = f->saturates ? f->top : f->top + 1;
  if (x.is == NOT_A_NUMBER)
    return f->nan;
  if (x.is == INFINITE)
    return sign | beyond;
  if (x.integer == 0)
    return sign; /* a sticky zero does not occur: sticky numbers keep their large part */
  int least = 1 - f->bias - f->mantissa; /* exponent of the smallest subnormal */
  int quantum = ref_top_bit(x.integer) + x.exponent - f->mantissa;
  if (quantum < least)
    quantum = least;
  int drop = quantum - x.exponent;
  u128 kept, rest = 0, half = 0;
  if (drop > 127) { /* below half of the least number */
    kept = 0;
    rest = 1;
    half = 2;
  } else if (drop > 0) {
    kept = x.integer >> drop;
    rest = x.integer & (((u128)1 << drop) - 1);
    half = (u128)1 << (drop - 1);
  } else {
    kept = x.integer << -drop;
  }
  if (rest > half || (rest == half && half && (x.sticky || (kept & 1))))
    kept++;
  /* kept = 2^mantissa + fraction in a binade, or a plain fraction when subnormal */
  uint64_t pattern = (uint64_t)kept + ((uint64_t)(quantum - least) << f->mantissa);
  return sign | (pattern > f->top ? beyond : pattern);
}

/* Exact, or with a sticky bit for what lies more than 120 bits below the larger operand. */
static number ref_add(number a, number b) {
  number none = {NOT_A_NUMBER, 0, 0, 0, 0};
  if (a.is == NOT_A_NUMBER || b.is == NOT_A_NUMBER)
    return none;
  if (a.is == INFINITE && b.is == INFINITE && a.negative != b.negative)
    return none;
  if (a.is == INFINITE || b.is == INFINITE)
    return a.is == INFINITE ? a : b;
  if (a.integer == 0 || b.integer == 0) {
    number r = a.integer ? a : b;
    if (a.integer == 0 && b.integer == 0)
      r.negative = a.negative && b.negative;
    return r;
  }
  int a_larger = a.exponent + ref_top_bit(a.integer) >= b.exponent + ref_top_bit(b.integer);
  number r = a_larger ? a : b, small = a_larger ? b : a;
  int up = 120 - ref_top_bit(r.integer);
  r.integer <<= up;
  r.exponent -= up;
  int down = r.exponent - small.exponent;
  if (down > 127) {
    small.integer = 0;
    r.sticky = 1;
  } else if (down > 0) {
    r.sticky = (small.integer & (((u128)1 << down) - 1)) != 0;
    small.integer >>= down;
  } else {
    small.integer <<= -down;
  }
  if (r.negative == small.negative) {
    r.integer += small.integer;
  } else if (r.integer >= small.integer) {
    r.integer -= small.integer + (u128)r.sticky; /* what is left over is then a fraction again */
  } else { /* same top bit, so nothing was cut off */
    r.integer = small.integer - r.integer;
    r.negative = small.negative;
  }
  if (r.integer == 0)
    r.negative = 0;
  return r;
}

static number ref_multiply(number a, number b) {
  number r = {FINITE, a.negative != b.negative, a.integer * b.integer, a.exponent + b.exponent, 0};
  int zero = (a.is == FINITE && a.integer == 0) || (b.is == FINITE && b.integer == 0);
  if (a.is == INFINITE || b.is == INFINITE)
    r.is = zero ? NOT_A_NUMBER : INFINITE;
  if (a.is == NOT_A_NUMBER || b.is == NOT_A_NUMBER)
    r.is = NOT_A_NUMBER;
  return r;
}

/* -1, 0, 1; both are numbers. -0 is below +0. */
static int ref_compare(number a, number b) {
  if (a.negative != b.negative)
    return a.negative ? -1 : 1;
  int larger = 0;
  if (a.is != b.is) {
    larger = a.is == INFINITE ? 1 : -1;
  } else if (a.is == FINITE) {
    number minus = b;
    minus.negative = !b.negative;
    number d = ref_add(a, minus);
    if (d.integer == 0)
      return 0;
    return d.negative ? -1 : 1;
  }
  return a.negative ? -larger : larger;
}

/* A float8 result passes through half. */
static uint64_t ref_round(int dtype, number x) {
  if (dtype == E4M3 || dtype == E5M2)
    x = ref_decode(&formats[F16], ref_encode(&formats[F16], x));
  return ref_encode(&formats[dtype], x);
}

static uint64_t ref_combine_floats(int dtype, int kind, uint64_t a, uint64_t b) {
  const format *f = &formats[dtype];
  number x = ref_decode(f, a), y = ref_decode(f, b);
  if (kind == HOST_OP_PROD)
    return ref_round(dtype, ref_multiply(x, y));
  if (kind != HOST_OP_MAX && kind != HOST_OP_MIN)
    return ref_round(dtype, ref_add(x, y));
  if (x.is == NOT_A_NUMBER || y.is == NOT_A_NUMBER)
    return ref_round(dtype, x.is == NOT_A_NUMBER ? y : x);
  int first = ref_compare(x, y) >= 0;
  return ref_round(dtype, first == (kind == HOST_OP_MAX) ? x : y);
}

static i128 ref_value(int dtype, uint64_t pattern) {
  const format *f = &formats[dtype];
  i128 modulus = (i128)1 << f->bits, v = (i128)pattern;
  return f->is_signed && v >= modulus / 2 ? v - modulus : v;
}

static uint64_t ref_wrap(int dtype, i128 v) {
  i128 modulus = (i128)1 << formats[dtype].bits;
  v %= modulus;
  return (uint64_t)(v < 0 ? v + modulus : v);
}

/* One combination: a (kind) b, both patterns of the dtype. */
static uint64_t ref_combine(int dtype, int kind, uint64_t a, uint64_t b) {
  if (formats[dtype].mantissa)
    return ref_combine_floats(dtype, kind, a, b);
  i128 x = ref_value(dtype, a), y = ref_value(dtype, b);
  if (kind == HOST_OP_PROD)
    return (uint64_t)(((u128)a * b) & (u128)(((i128)1 << formats[dtype].bits) - 1));
  if (kind == HOST_OP_MAX)
    return ref_wrap(dtype, x > y ? x : y);
  if (kind == HOST_OP_MIN)
    return ref_wrap(dtype, x < y ? x : y);
  return ref_wrap(dtype, x + y);
}

/* The average of integers: of the wrapped sum, toward zero. */
static uint64_t ref_divide(int dtype, uint64_t sum, int nranks) {
  return ref_wrap(dtype, ref_value(dtype, sum) / nranks);
}

/* The factor of an average: 1/nranks rounded to float and from there to the type; double directly. */
static uint64_t ref_reciprocal(int dtype, int nranks) {
  number x = {FINITE, 0, ((u128)1 << 120) / (u128)nranks, -120, 0};
  x.sticky = ((u128)1 << 120) % (u128)nranks != 0;
  if (dtype == F64)
    return ref_encode(&formats[F64], x);
  return ref_encode(&formats[dtype], ref_decode(&formats[F32], ref_encode(&formats[F32], x)));
}

/* Elements by index, from buffers of any alignment; little-endian, as every machine this library runs on. */
static uint64_t ref_get(int dtype, const void *data, size_t i) {
  uint64_t pattern = 0;
  size_t size = (size_t)formats[dtype].bits / 8;
  memcpy(&pattern, (const char *)data + i * size, size);
  return pattern;
}

static void ref_put(int dtype, void *data, size_t i, uint64_t pattern) {
  size_t size = (size_t)formats[dtype].bits / 8;
  memcpy((char *)data + i * size, &pattern, size);
}

#endif
