/* A minimal test kit: CHECK counts and reports, FINISH is main's return value. Single-threaded programs only.
 */
#ifndef PYNCCL_TESTS_CHECK_H
#define PYNCCL_TESTS_CHECK_H

#include <stdint.h>
#include <stdio.h>

enum { CHECK_SHOWN = 20 };

static unsigned long check_passed, check_failed;

/* CHECK(condition, format, ...): the text is printed for the first failures only. */
#define CHECK(condition, ...)                                                                  \
  do {                                                                                         \
    if (condition) {                                                                           \
      check_passed++;                                                                          \
    } else if (check_failed++ < CHECK_SHOWN) {                                                 \
      fprintf(stderr, "%s:%d: failed: %s: ", __FILE__, __LINE__, #condition);                  \
      fprintf(stderr, __VA_ARGS__);                                                            \
      fputc('\n', stderr);                                                                     \
    }                                                                                          \
  } while (0)

/* No check at all is a failure too: a loop that never ran must not look like success. */
#define FINISH()                                                                               \
  (printf("%lu checks passed, %lu failed\n", check_passed, check_failed),                      \
   check_failed > 0 || check_passed == 0)

/* xorshift64*: the same numbers on every machine. */
static inline uint64_t check_random(uint64_t *state) {
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  return *state * 0x2545f4914f6cdd1dULL;
}

#endif
