#ifndef PYNCCL_HOST_API_CONFIG_H
#define PYNCCL_HOST_API_CONFIG_H

#include "comm.h"

/* The caller's config with everything it does not say set to "undefined". NULL means all of it. */
ncclResult_t host_config_read(const ncclConfig_t *from, ncclConfig_t *out);

/* What it says of the communicator; NCCL_COMM_BLOCKING goes before `blocking`. */
struct host_traits host_config_traits(const ncclConfig_t *parsed);

#endif
