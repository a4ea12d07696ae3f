"""The rows of NCCL_SYMBOLS and HOST_SYMBOLS as Python objects, read by the compiler's own preprocessor."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache

from helpers.build import ABI_HEADER, compiler


@dataclass(frozen=True)
class Param:
    """One parameter of a C function."""

    type: str
    name: str


@dataclass(frozen=True)
class Symbol:
    """One row: a C function and the first NCCL release that has it."""

    ret: str
    name: str
    version: int
    params: tuple[Param, ...]

    @property
    def prototype(self) -> str:
        """The declaration, without the semicolon."""
        params = ", ".join(declare(p) for p in self.params) or "void"
        return f"{self.ret} {self.name}({params})"


def declare(param: Param) -> str:
    """Return the parameter as C writes it."""
    if "(*)" in param.type:
        return param.type.replace("(*)", f"(*{param.name})")
    return f"{param.type}{'' if param.type.endswith('*') else ' '}{param.name}"


@cache
def nccl_symbols() -> tuple[Symbol, ...]:
    """Return the public functions of NCCL 2.32."""
    return _rows("NCCL_SYMBOLS")


@cache
def host_symbols() -> tuple[Symbol, ...]:
    """Return the host library's extensions."""
    return _rows("HOST_SYMBOLS")


def _rows(list_name: str) -> tuple[Symbol, ...]:
    source = (
        f'#include "{ABI_HEADER}"\n'
        "#define ROW(ret, name, version, args) @ret;name;version;args@\n"
        f"BEGIN_ROWS {list_name}(ROW)\n"
    )
    text = subprocess.run(
        [*compiler(), "-E", "-P", "-x", "c", "-"],
        input=source,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = re.findall(r"@(.*?)@", text[text.index("BEGIN_ROWS") :], re.DOTALL)
    return tuple(_symbol(row) for row in rows)


def _symbol(row: str) -> Symbol:
    ret, name, version, args = (" ".join(field.split()) for field in row.split(";"))
    inner = args[1:-1].strip()
    params = () if inner == "void" else tuple(_param(part) for part in _split(inner))
    return Symbol(ret, name, int(version), params)


def _split(text: str) -> list[str]:
    """Split at the commas that are not inside parentheses."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _param(text: str) -> Param:
    text = text.strip()
    if match := re.match(r"(.*)\(\s*\*\s*(\w+)\s*\)(.*)", text):  # pointer to a function
        return Param(f"{match[1].strip()} (*){match[3].strip()}", match[2])
    match = re.match(r"(.*?)(\w+)$", text)
    assert match, text
    return Param(match[1].strip(), match[2])
