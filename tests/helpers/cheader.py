"""What a C header of NCCL's kind declares: enumerators, constants, structs with their fields, functions.

Not a C parser: it reads the plain style of NCCL's header and of ours, and the compiler then judges every
name that it found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Header:
    """The names that a header declares."""

    enumerators: set[str] = field(default_factory=set)
    enums: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    initializers: set[str] = field(default_factory=set)
    structs: dict[str, list[str]] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> Header:
        """Read a file."""
        text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        text = text.replace("\\\n", " ")
        self = cls()
        for name, value in re.findall(
            r"^[ \t]*#define[ \t]+(NCCL_\w+)[ \t]+(.+)$", text, re.MULTILINE
        ):
            if name.endswith("_INITIALIZER"):
                self.initializers.add(name)
            elif not name.startswith("NCCL_SYMBOLS") and value.strip() != '""':
                self.constants.add(name)
        for body, name in re.findall(r"typedef\s+enum\s*\{(.*?)\}\s*(\w+)\s*;", text, re.DOTALL):
            self.enums.add(name)
            self.enumerators.update(re.findall(r"(\w+)\s*(?:=[^,]*)?(?:,|$)", body.strip()))
        for match in re.finditer(r"typedef\s+struct\s*\w*\s*\{", text):
            end = _closing(text, match.end())
            name = re.match(r"\s*(\w+)", text[end:])
            assert name, text[match.start() : end]
            self.structs[name[1]] = list(_fields(text[match.end() : end - 1]))
        self.functions.update(re.findall(r"^\s*(?:ncclResult_t|const char\s*\*|void)\s+(nccl\w+)\s*\(",
                                         text, re.MULTILINE))  # fmt: skip
        return self


def _closing(text: str, start: int) -> int:
    """Return the place after the brace that closes the one before `start`."""
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i + 1
    raise AssertionError("unbalanced braces")


def _fields(body: str) -> Iterator[str]:
    """Yield the members of a struct; those of a nested struct or union as ``outer.inner``."""
    at = 0
    while match := re.compile(r"[^;{]*([;{])").match(body, at):
        if match[1] == ";":
            name = re.search(r"(\w+)\s*(?:\[\s*\w+\s*\]\s*)?;$", match[0])
            assert name, match[0]
            yield name[1]
            at = match.end()
        else:
            end = _closing(body, match.end())
            outer = re.match(r"\s*(\w+)\s*;", body[end:])
            assert outer, body[end:]
            yield outer[1]
            for inner in _fields(body[match.end() : end - 1]):
                yield f"{outer[1]}.{inner}"
            at = end + outer.end()
