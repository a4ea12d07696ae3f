from typing import Any, final

from typing_extensions import disjoint_base

from ._fields import Fields

@final
class UserOp:
    scalar: Any

@disjoint_base
class Setting(Fields): ...
