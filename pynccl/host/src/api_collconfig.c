/* Collectives with a configuration (NCCL 2.31): the exported functions.
 *
 * The configuration is checked before anything else, in NCCL's order and words, and an error of it does not
 * poison an open group. Beyond the checks it has no effect: CTAs, algorithms and profiler tags say how a GPU
 * is to do it. A launch completion event is one of the host library's: it is recorded behind what is queued on
 * the stream so far, so that it is done when nothing but its peers keeps the call from running. No state.
 */
#include <string.h>

#include "api.h"

enum { HEAD = 16 /* bytes: size, magic and version */, MOST_POLICY = 3 };

static ncclResult_t check(const ncclCollConfig_t *from) {
    ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
    if (!from)
        return ncclSuccess;
    /* A caller of another release has a shorter or longer struct. */
    size_t size = from->size < HEAD ? sizeof from->size : from->size < sizeof config ? from->size : sizeof config;
    config.magic = 0;
    memcpy(&config, from, size);
    if (config.magic != NCCL_API_MAGIC)
        return host_fail(ncclInvalidArgument, "ncclCollConfig_t magic mismatch (got 0x%x, expected 0x%x)",
            config.magic, NCCL_API_MAGIC);
    if (config.forceAlgSelection != 0 && config.forceAlgSelection != 1)
        return host_fail(ncclInvalidArgument, "config->forceAlgSelection=%d is invalid, accepted values are 0 or 1",
            config.forceAlgSelection);
    if (config.CTAPolicy != NCCL_CONFIG_UNDEF_INT && (config.CTAPolicy < 0 || config.CTAPolicy > MOST_POLICY))
        return host_fail(ncclInvalidArgument, "config->CTAPolicy=%d is invalid, accepted values are [1, %d]",
            config.CTAPolicy, MOST_POLICY);
    return ncclSuccess;
}

/* After the communicator, of which NCCL complains first; of the stream the call itself will. */
static ncclResult_t record(const ncclCollConfig_t *from, ncclComm_t comm, cudaStream_t stream) {
    const size_t end = offsetof(ncclCollConfig_t, launchCompletionEvent) + sizeof from->launchCompletionEvent;
    if (!from || !comm || from->size < end || !from->launchCompletionEvent)
        return ncclSuccess;
    if (pyncclHostEventQuery(from->launchCompletionEvent) == ncclInvalidArgument)
        return host_group_poison(host_fail(ncclInvalidArgument, "config->launchCompletionEvent=%p is not an event of "
            "the host library", (void *)from->launchCompletionEvent));
    pyncclHostEventRecord(from->launchCompletionEvent, stream);
    return ncclSuccess;
}

#define WITH_CONFIG(call) \
    ncclResult_t code = check(config); \
    if (!code) \
        code = record(config, comm, stream); \
    return code ? code : (call)

ncclResult_t pncclAllReduceConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config) {
    WITH_CONFIG(pncclAllReduce(sendbuff, recvbuff, count, datatype, op, comm, stream));
}
HOST_EXPORT(ncclAllReduceConfig);

ncclResult_t pncclReduceConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config) {
    WITH_CONFIG(pncclReduce(sendbuff, recvbuff, count, datatype, op, root, comm, stream));
}
HOST_EXPORT(ncclReduceConfig);

ncclResult_t pncclBroadcastConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config) {
    WITH_CONFIG(pncclBroadcast(sendbuff, recvbuff, count, datatype, root, comm, stream));
}
HOST_EXPORT(ncclBroadcastConfig);

ncclResult_t pncclAllGatherConfig(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config) {
    WITH_CONFIG(pncclAllGather(sendbuff, recvbuff, sendcount, datatype, comm, stream));
}
HOST_EXPORT(ncclAllGatherConfig);

ncclResult_t pncclReduceScatterConfig(const void *sendbuff, void *recvbuff, size_t recvcount,
    ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config) {
    WITH_CONFIG(pncclReduceScatter(sendbuff, recvbuff, recvcount, datatype, op, comm, stream));
}
HOST_EXPORT(ncclReduceScatterConfig);

ncclResult_t pncclAlltoAllConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config) {
    WITH_CONFIG(pncclAlltoAll(sendbuff, recvbuff, count, datatype, comm, stream));
}
HOST_EXPORT(ncclAlltoAllConfig);

ncclResult_t pncclGatherConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config) {
    WITH_CONFIG(pncclGather(sendbuff, recvbuff, count, datatype, root, comm, stream));
}
HOST_EXPORT(ncclGatherConfig);

ncclResult_t pncclScatterConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config) {
    WITH_CONFIG(pncclScatter(sendbuff, recvbuff, count, datatype, root, comm, stream));
}
HOST_EXPORT(ncclScatterConfig);
