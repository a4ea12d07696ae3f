from typing import final

from ._fields import Fields

@final
class Config(Fields):
    def __init__(
        self,
        *,
        blocking: bool | None = None,
        cga_cluster_size: int | None = None,
        min_ctas: int | None = None,
        max_ctas: int | None = None,
        net_name: str | None = None,
        split_share: bool | None = None,
        traffic_class: int | None = None,
        comm_name: str | None = None,
        collnet_enable: bool | None = None,
        cta_policy: int | None = None,
        shrink_share: bool | None = None,
        nvls_ctas: int | None = None,
        n_channels_per_net_peer: int | None = None,
        nvlink_centric_sched: bool | None = None,
        graph_usage_mode: int | None = None,
        num_rma_ctx: int | None = None,
        max_p2p_peers: int | None = None,
        graph_stream_ordering: bool | None = None,
        launch_order_implicit: int | None = None,
        num_rma_sig: int | None = None,
        rma_eager_init: int | None = None,
        host_cft_mode: int | None = None,
        nvls_host_mode: int | None = None,
    ) -> None: ...
