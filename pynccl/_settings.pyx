"""`Config`: what can be set when a communicator is created."""

from libc.limits cimport INT_MAX

from pynccl._fields cimport Fields, flag, integer, text
from pynccl._nccl cimport Library, NCCL_CONFIG_DEFAULT, ncclConfig_t, unsupported


cdef list _rows():
    """One row per field of ``ncclConfig_t``: name, where it is, what it takes, since which NCCL, in NCCL's order."""
    cdef ncclConfig_t c
    cdef char *at = <char *>&c
    return [
        ("blocking", <char *>&c.blocking - at, bool, 21400),
        ("cga_cluster_size", <char *>&c.cgaClusterSize - at, int, 21700),
        ("min_ctas", <char *>&c.minCTAs - at, int, 21700),
        ("max_ctas", <char *>&c.maxCTAs - at, int, 21700),
        ("net_name", <char *>&c.netName - at, str, 21700),
        ("split_share", <char *>&c.splitShare - at, bool, 21803),
        ("traffic_class", <char *>&c.trafficClass - at, int, 22605),
        ("comm_name", <char *>&c.commName - at, str, 22700),
        ("collnet_enable", <char *>&c.collnetEnable - at, bool, 22700),
        ("cta_policy", <char *>&c.CTAPolicy - at, int, 22700),
        ("shrink_share", <char *>&c.shrinkShare - at, bool, 22700),
        ("nvls_ctas", <char *>&c.nvlsCTAs - at, int, 22700),
        ("n_channels_per_net_peer", <char *>&c.nChannelsPerNetPeer - at, int, 22800),
        ("nvlink_centric_sched", <char *>&c.nvlinkCentricSched - at, bool, 22800),
        ("graph_usage_mode", <char *>&c.graphUsageMode - at, int, 22900),
        ("num_rma_ctx", <char *>&c.numRmaCtx - at, int, 22900),
        ("max_p2p_peers", <char *>&c.maxP2pPeers - at, int, 23000),
        ("graph_stream_ordering", <char *>&c.graphStreamOrdering - at, bool, 23005),
        ("launch_order_implicit", <char *>&c.launchOrderImplicit - at, int, 23100),
        ("num_rma_sig", <char *>&c.numRmaSig - at, int, 23100),
        ("rma_eager_init", <char *>&c.rmaEagerInit - at, int, 23100),
        ("host_cft_mode", <char *>&c.hostCftMode - at, int, 23100),
        ("nvls_host_mode", <char *>&c.nvlsHostMode - at, int, 23200),
    ]


_ROWS = {row[0]: row for row in _rows()}


cdef class Config(Fields):
    """Settings of a communicator, for the ``config=`` of what creates one.

    A field that is left out, or None, keeps NCCL's default.  Most of them tune NCCL on GPUs and mean
    nothing to the host library, which checks them as NCCL does.

    Parameters
    ----------
    blocking : bool, optional
        False: the creation returns at once, and `Communicator.wait_ready` waits for it.
    cga_cluster_size : int, optional
        Blocks of a cluster.
    min_ctas, max_ctas : int, optional
        Blocks that a call may use; give both or only `max_ctas`.
    net_name : str, optional
        Network module.
    split_share, shrink_share : bool, optional
        Whether children share resources with this communicator.
    traffic_class : int, optional
        Of the network's packets.
    comm_name : str, optional
        A name for logs and profilers.
    collnet_enable : bool, optional
        Whether reductions may happen inside the network.
    cta_policy : int, optional
        0 default, 1 efficiency, 2 zero CTA; they combine.
    nvls_ctas : int, optional
        Blocks of NVLink SHARP.
    n_channels_per_net_peer, max_p2p_peers : int, optional
        Resources of messages.
    nvlink_centric_sched : bool, optional
        Whether NVLink is preferred.
    graph_usage_mode : int, optional
        0 without CUDA graphs, 1 one graph at a time, 2 any mixture.
    graph_stream_ordering : bool, optional
        Whether captured and plain launches are ordered.
    launch_order_implicit : int, optional
        Whether launches of several communicators keep their order.
    num_rma_ctx, num_rma_sig, rma_eager_init : int, optional
        Resources of one-sided calls.
    host_cft_mode, nvls_host_mode : int, optional
        NCCL's modes of these names.

    Attributes
    ----------
    values : dict
        What was given, by name.

    Raises
    ------
    TypeError
        A field is of the wrong type.
    ValueError
        A number does not fit in 32 bits, or `min_ctas` comes without `max_ctas`.

    Notes
    -----
    C type: ``ncclConfig_t``, NCCL 2.14 to 2.32.  A field that is newer than the loaded NCCL is an
    `UnsupportedError` when the config is used.

    Examples
    --------
    >>> import pynccl
    >>> config = pynccl.Config(min_ctas=1, max_ctas=4)
    >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0, config=config) as comm:
    ...     comm.nranks
    1
    """

    NAMES = tuple(_ROWS)

    def __init__(self, *, blocking=None, cga_cluster_size=None, min_ctas=None, max_ctas=None,
                 net_name=None, split_share=None, traffic_class=None, comm_name=None,
                 collnet_enable=None, cta_policy=None, shrink_share=None, nvls_ctas=None,
                 n_channels_per_net_peer=None, nvlink_centric_sched=None, graph_usage_mode=None,
                 num_rma_ctx=None, max_p2p_peers=None, graph_stream_ordering=None,
                 launch_order_implicit=None, num_rma_sig=None, rma_eager_init=None,
                 host_cft_mode=None, nvls_host_mode=None):
        given = locals()
        self.c = NCCL_CONFIG_DEFAULT
        self.values = {}
        self.held = {}
        for name in self.NAMES:
            if given[name] is not None:
                self.values[name] = self.put(name, given[name])
        if "min_ctas" in self.values and "max_ctas" not in self.values:
            raise ValueError(
                "Config: min_ctas is given without max_ctas, which NCCL takes for a maximum below it; "
                "give both"
            )

    cdef object put(self, str name, object value):
        """Store one field where C reads it; return it as the type it is."""
        cdef Py_ssize_t at = _ROWS[name][1]
        cdef char *field = <char *>&self.c + at
        kind = _ROWS[name][2]
        called = f"Config: {name}"
        if kind is str:
            self.held[name] = text(called, value)
            (<const char **>field)[0] = <const char *><bytes>self.held[name]
        elif kind is bool:
            (<int *>field)[0] = flag(called, value)
        else:
            value = integer(called, value, -INT_MAX)    # the least is NCCL's "undefined"
            (<int *>field)[0] = value
        return value

    cdef int fits(self, Library library) except -1:
        """Raise where a field is newer than the library."""
        for name in self.values:
            since = _ROWS[name][3]
            if since > library.version:
                raise unsupported(f"Config: {name}", since, library.api)
        return 0
