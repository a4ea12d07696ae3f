/* ncclConfig_t: which of the caller's fields count, and which values are wrong. No state.
 *
 * A caller compiled against an older NCCL passes a shorter struct, one compiled against a newer NCCL a longer
 * one: `size` says how much there is, the rest keeps the defaults. Fields newer than the caller's `version`
 * are ignored even when they lie within its size, because older initialisers left them to chance.
 */
#include "api_config.h"

#include <stdlib.h>
#include <string.h>

static void forget_newer(ncclConfig_t *c) {
    const int undef = NCCL_CONFIG_UNDEF_INT;
    unsigned v = c->version;
    if (v < NCCL_VERSION(2, 14, 0))
        c->blocking = undef;
    if (v < NCCL_VERSION(2, 17, 0)) {
        c->cgaClusterSize = c->minCTAs = c->maxCTAs = undef;
        c->netName = NCCL_CONFIG_UNDEF_PTR;
    }
    if (v < NCCL_VERSION(2, 25, 0))
        c->trafficClass = undef;
    if (v < NCCL_VERSION(2, 27, 0))
        c->collnetEnable = c->CTAPolicy = c->shrinkShare = c->nvlsCTAs = undef;
    if (v < NCCL_VERSION(2, 28, 0))
        c->nChannelsPerNetPeer = c->nvlinkCentricSched = undef;
    if (v < NCCL_VERSION(2, 29, 0))
        c->graphUsageMode = c->numRmaCtx = undef;
    if (v < NCCL_VERSION(2, 30, 0))
        c->maxP2pPeers = undef;
    if (v < NCCL_VERSION(2, 30, 5))
        c->graphStreamOrdering = undef;
}

struct range {
    const char *name;
    int value, low, high;
};

static ncclResult_t check_values(const ncclConfig_t *c) {
    const struct range ranges[] = {
        {"blocking", c->blocking, 0, 1},
        {"cgaClusterSize", c->cgaClusterSize, 0, INT_MAX},
        {"splitShare", c->splitShare, 0, 1},
        {"collnetEnable", c->collnetEnable, 0, 1},
        {"policy", c->CTAPolicy, 0, 3},
        {"shrinkShare", c->shrinkShare, 0, 1},
        {"nvlsCTAs", c->nvlsCTAs, 1, INT_MAX},
        {"nChannelsPerNetPeer", c->nChannelsPerNetPeer, 1, 64},
        {"nvlinkCentricSched", c->nvlinkCentricSched, 0, 1},
        {"graphUsageMode", c->graphUsageMode, 0, 2},
        {"numRmaCtx", c->numRmaCtx, 0, INT_MAX},
        {"maxP2pPeers", c->maxP2pPeers, 1, INT_MAX},
        {"graphStreamOrdering", c->graphStreamOrdering, 0, 1},
        /* Of these NCCL has the text, and no document the limits: what is negative is certainly wrong. */
        {"launchOrderImplicit", c->launchOrderImplicit, 0, INT_MAX},
        {"numRmaSig", c->numRmaSig, 0, INT_MAX},
        {"rmaEagerInit", c->rmaEagerInit, 0, INT_MAX},
        {"hostCftMode", c->hostCftMode, 0, INT_MAX},
        {"nvlsHostMode", c->nvlsHostMode, 0, INT_MAX},
    };
    const int undef = NCCL_CONFIG_UNDEF_INT;
    /* Before defaults are filled in: setting only one of the two compares it with "undefined", which is less
     * than everything. */
    if ((c->minCTAs != undef && c->minCTAs <= 0) || (c->maxCTAs != undef && c->maxCTAs <= 0) ||
        c->minCTAs > c->maxCTAs)
        return host_fail(ncclInvalidArgument, "Invalid config min/max channels attribute value %d/%d",
            c->minCTAs, c->maxCTAs);
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        const struct range *r = &ranges[i];
        if (r->value != undef && (r->value < r->low || r->value > r->high))
            return host_fail(
                ncclInvalidArgument, "Invalid config %s attribute value %d", r->name, r->value);
    }
    return ncclSuccess;
}

ncclResult_t host_config_read(const ncclConfig_t *from, ncclConfig_t *out) {
    *out = (ncclConfig_t)NCCL_CONFIG_INITIALIZER;
    if (!from)
        return ncclSuccess;
    size_t size;
    memcpy(&size, from, sizeof size);
    /* A zeroed struct has size 0; its magic is what is wrong with it. */
    out->magic = 0;
    memcpy(out, from, size < sizeof *out ? size : sizeof *out);
    if (out->magic != NCCL_API_MAGIC)
        return host_fail(
            ncclInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    forget_newer(out);
    return check_values(out);
}

static int is_nonblocking(const ncclConfig_t *parsed) {
    const char *text = getenv("NCCL_COMM_BLOCKING");
    if (text && (!strcmp(text, "0") || !strcmp(text, "1")))
        return *text == '0';
    return parsed->blocking == 0;
}

/* One where nothing is said, and no more than there is room for: beyond, a call is refused. */
static int bounded(int value, int most) {
    return value == NCCL_CONFIG_UNDEF_INT ? 1 : value < most ? value : most;
}

struct host_traits host_config_traits(const ncclConfig_t *parsed) {
    return (struct host_traits){is_nonblocking(parsed), bounded(parsed->numRmaCtx, HOST_CONTEXTS),
        bounded(parsed->numRmaSig, HOST_SIGNALS)};
}
