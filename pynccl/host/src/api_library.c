/* The library itself: version, error texts, groups, and the extensions of the host library.
 *
 * Each function hands on to the file that owns what it is about. No state.
 */
#include "api.h"

ncclResult_t pncclGetVersion(int *version) {
    if (!version)
        return ncclInvalidArgument; /* NCCL leaves the last error alone here */
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
HOST_EXPORT(ncclGetVersion);

const char *pncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
        return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
        return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
        return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
        return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
        return "remote process exited or there was a network error";
    case ncclInProgress:
        return "NCCL operation in progress";
    case ncclTimeout:
        return "timeout";
    default:
        return "unknown result code";
    }
}
HOST_EXPORT(ncclGetErrorString);

const char *pncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return host_fail_any_text();
}
HOST_EXPORT(ncclGetLastError);

/* ---- groups ---------------------------------------------------------------------------------------- */

ncclResult_t pncclGroupStart(void) {
    host_group_start();
    return ncclSuccess;
}
HOST_EXPORT(ncclGroupStart);

ncclResult_t pncclGroupEnd(void) {
    return host_group_end();
}
HOST_EXPORT(ncclGroupEnd);

ncclResult_t pncclGroupSimulateEnd(ncclSimInfo_t *simInfo) {
    return host_group_simulate(simInfo);
}
HOST_EXPORT(ncclGroupSimulateEnd);

/* ---- extensions ------------------------------------------------------------------------------------ */

int pyncclHostStamp(void) {
    return (int)host_stamp();
}

const char *pyncclHostLastError(void) {
    return host_fail_text();
}

void pyncclHostSetInterrupt(int (*hook)(void)) {
    host_set_interrupt(hook);
}

void pyncclHostSetInitTimeout(double seconds) {
    host_set_init_timeout(seconds);
}

ncclResult_t pyncclHostSetTimeout(ncclComm_t comm, double seconds) {
    ncclResult_t code = host_comm_check(comm, "pyncclHostSetTimeout");
    if (!code)
        host_publish(&comm->timeout, host_timeout_ns(seconds));
    return code;
}
