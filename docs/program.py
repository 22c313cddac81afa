"""Prints the first Python program of a page: the programs that guides run are those that they show.

python docs/program.py docs/start.md > digits.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def main() -> int:
    """Prints the block; status 1 if the page has none."""
    page = Path(sys.argv[1])
    block = BLOCK.search(page.read_text(encoding="utf-8"))
    if block is None:
        print(f"{page} has no block of Python", file=sys.stderr)
        return 1
    print(block[1], end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
