from typing import Any, final

from typing_extensions import disjoint_base

@final
class UserOp:
    scalar: Any

@disjoint_base
class Setting: ...
