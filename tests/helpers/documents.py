"""The fenced blocks of a document, and what a comment before a block says of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Block:
    """One fenced block."""

    document: Path
    line: int
    language: str
    text: str
    directives: dict[str, str]

    @property
    def id(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> list[Block]:
    """Read a document; a comment ``<!-- key: value -->`` belongs to the block that follows it."""
    found = []
    directives: dict[str, str] = {}
    language, start, body = "", 0, []
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if language:
            if line.strip() == "```":
                found.append(Block(document, start, language, "\n".join(body) + "\n", directives))
                language, body, directives = "", [], {}
            else:
                body.append(line)
        elif match := re.fullmatch(r"\s*```(\w+)", line):
            language, start = match.group(1), number
        elif match := re.fullmatch(r"<!-- ([\w ]+?)(?:: (.*))? -->", line.strip()):
            directives[match.group(1)] = match.group(2) or ""
        elif line.strip():
            directives = {}
    assert not language, f"{document}: a block is not closed"
    return found
