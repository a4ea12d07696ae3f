/* The cost model of ncclGroupSimulateEnd. See simulate.c. */
#ifndef PYNCCL_HOST_SIMULATE_H
#define PYNCCL_HOST_SIMULATE_H

#include "work.h"

/* Microseconds that these collectives and messages would take together. */
double host_simulate(struct host_work *const *works, int n);

#endif
