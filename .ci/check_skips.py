"""Fail on a skipped test that nobody has agreed to.

Usage: check_skips.py JUNIT_XML ALLOWED

ALLOWED holds one regular expression a line, matched against ``file::test: reason``; what a line starts with
``#`` says why. A skip hides a missing part unless its reason cannot be removed on this machine.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def main(report: str, allowed: str) -> int:
    """Print the verdict; give the exit status."""
    lines = [line.strip() for line in Path(allowed).read_text().splitlines()]
    patterns = [line for line in lines if line and not line.startswith("#")]
    used: set[str] = set()
    strangers = []
    skipped = executed = 0
    for case in ET.parse(report).iter("testcase"):
        skip = case.find("skipped")
        if skip is None:
            executed += 1
            continue
        skipped += 1
        text = f"{case.get('classname')}::{case.get('name')}: {skip.get('message')}"
        matching = [pattern for pattern in patterns if re.search(pattern, text)]
        used.update(matching)
        if not matching:
            strangers.append(text)
    for text in strangers:
        print("not in the list of allowed skips:", text)
    for pattern in patterns:
        if pattern not in used:
            print("listed, and nothing was skipped for it:", pattern)
    print(f"{executed} tests ran, {skipped} skips, {len(strangers)} of them not allowed")
    return 1 if strangers or not executed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
