"""The programs and commands of the pages, as a reader would copy them.

A block ```` ```python ```` whose first line is a comment with a file's name, `# cluster.py`, is a
complete program. A block ```` ```sh ```` is commands that a reader types in the directory of these
programs. Blocks of other kinds are there to be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("from_tensorflow", "from_pytorch", "questions")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True)
class Page:
    """A page with what runs of it.

    Attributes:
        path: its file.
        programs: the text of each complete program, by its file's name.
        commands: each block of commands, in the page's order.
    """

    path: Path
    programs: dict[str, str]
    commands: list[str]


def read(path: Path) -> Page:
    """Returns a page."""
    programs: dict[str, str] = {}
    commands = []
    for kind, text in _BLOCK.findall(path.read_text(encoding="utf-8")):
        name = _NAME.match(text)
        if kind == "python" and name is not None:
            programs[name[1]] = text
        elif kind == "sh":
            commands.append(text)
    return Page(path, programs, commands)


def pages() -> list[Page]:
    """Returns every page of the folders whose programs run, and the page of messages."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
    return [read(path) for path in (*found, ROOT / "docs" / "troubleshooting.md")]
