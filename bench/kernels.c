/* How fast the host library reduces: GB/s for each element type and operator, beside memcpy.
 *
 * Counted are bytes read and written: (n + 1) x the vector, and 2 x for memcpy and for scaling. Three vector
 * sizes stand for the first cache, the second and memory. Each number is the best of several batches of about
 * 20 ms of processor time, so that what else runs on the machine shows as little as possible.
 *
 *     meson setup build -Dtests=true && meson compile -C build && build/tests/host/bench_kernels [base]
 *
 * "base" times the loops of the compiler's default target instead of the fastest ones this machine can run.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels.h"

enum { SOURCES = 4, BATCHES = 5, SIZES = 3 };

static const size_t sizes[SIZES] = {4 << 10, 64 << 10, 8 << 20};
static const char *dtype_names[HOST_DTYPES] = {"int8",   "uint8",   "int32",   "uint32",
                                               "int64",  "uint64",  "float16", "float32",
                                               "float64", "bfloat16", "e4m3",  "e5m2"};
static const char *kind_names[] = {"sum", "prod", "max", "min", "avg", "premul"};

static unsigned char *buffers[SOURCES + 1];

typedef struct job {
  const host_kernels *k; /* NULL: memcpy */
  int dtype, kind, n;    /* n == 0: scale */
  size_t nbytes;
} job;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void once(const job *j) {
  const void *src[SOURCES];
  host_op op = {j->kind, j->n, {0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38}};
  for (int r = 0; r < SOURCES; r++)
    src[r] = buffers[r];
  if (!j->k)
    memcpy(buffers[SOURCES], buffers[0], j->nbytes);
  else if (j->n == 0)
    j->k->scale[j->dtype](buffers[SOURCES], src[0], op.scalar, j->nbytes / host_dtype_size(j->dtype));
  else
    host_reduce_on(j->k, j->dtype, &op, buffers[SOURCES], src, j->n,
                   j->nbytes / host_dtype_size(j->dtype));
}

/* GB/s */
static double rate(const job *j) {
  double best = 0, bytes = (double)j->nbytes * (j->n ? j->n + 1 : 2);
  long calls = 1;
  for (int batch = 0; batch < BATCHES; batch++) {
    double start = now(), spent;
    for (long i = 0; i < calls; i++)
      once(j);
    spent = now() - start;
    if (spent < 0.01) {
      calls = spent > 1e-5 ? (long)((double)calls * 0.02 / spent) + 1 : calls * 1000;
      batch--;
    } else if (bytes * (double)calls / spent > best) {
      best = bytes * (double)calls / spent;
    }
  }
  return best * 1e-9;
}

static void row(const char *dtype, const char *kind, job j) {
  printf("%-9s %-7s", dtype, kind);
  for (int n = 2; n <= (j.n ? 4 : 2); n += 2) {
    for (int s = 0; s < SIZES; s++) {
      j.n = j.n ? n : 0;
      j.nbytes = sizes[s];
      printf(" %7.1f", rate(&j));
    }
  }
  printf("\n");
  fflush(stdout);
}

int main(int argc, char **argv) {
  const host_kernels *k = argc > 1 && !strcmp(argv[1], "base") ? &host_kernels_base : host_kernels_best();
  for (int b = 0; b <= SOURCES; b++) {
    buffers[b] = malloc(sizes[SIZES - 1]);
    if (!buffers[b])
      return 1;
    for (size_t i = 0; i < sizes[SIZES - 1]; i++) /* ordinary numbers of every type */
      buffers[b][i] = (unsigned char)(0x30 + (i * 7 + (size_t)b) % 16);
  }
  printf("GB/s              n=2:  4K     64K      8M    n=4:  4K     64K      8M\n");
  row("-", "memcpy", (job){.k = NULL, .n = 0});
  for (int dtype = 0; dtype < HOST_DTYPES; dtype++) {
    for (int kind = HOST_OP_SUM; kind <= HOST_OP_AVG; kind++) {
      if (kind != HOST_OP_AVG || k->divide[dtype]) /* over floats: a sum of scaled inputs */
        row(dtype_names[dtype], kind_names[kind], (job){k, dtype, kind, 2, 0});
    }
    row(dtype_names[dtype], "scale", (job){k, dtype, HOST_OP_PREMUL, 0, 0});
  }
  for (int b = 0; b <= SOURCES; b++)
    free(buffers[b]);
  return 0;
}
