from typing_extensions import disjoint_base

from ._call import Setting

@disjoint_base
class CollConfig(Setting):
    def __init__(
        self,
        *,
        min_ctas: int | None = None,
        max_ctas: int | None = None,
        nvls_ctas: int | None = None,
        cga_cluster_size: int | None = None,
        alg_selection: str | None = None,
        force_alg_selection: bool | None = None,
        cta_policy: int | None = None,
        user_profiler_tag: int | None = None,
        launch_completion_event: int | None = None,
    ) -> None: ...
