#ifndef PYNCCL_HOST_API_CONFIG_H
#define PYNCCL_HOST_API_CONFIG_H

#include "error.h"

/* The caller's config with everything it does not say set to "undefined". NULL means all of it. */
ncclResult_t host_config_read(const ncclConfig_t *from, ncclConfig_t *out);

/* Does the config, or NCCL_COMM_BLOCKING in its place, ask for a nonblocking communicator? */
int host_config_nonblocking(const ncclConfig_t *parsed);

#endif
