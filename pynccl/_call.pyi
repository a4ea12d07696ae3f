from typing import Any, final

@final
class UserOp:
    scalar: Any
