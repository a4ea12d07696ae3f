/* The loops as the compiler's default target has them (SSE2 on x86-64, NEON on aarch64).
 * Runs everywhere and is the reference for the other tables: constant data only, no locks.
 */
#define HOST_ISA
#define HOST_TABLE host_kernels_base
#include "loops.h"
