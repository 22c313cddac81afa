"""Renders what a terminal showed, colours and all, as an SVG: how the pictures here were made.

    tmux capture-pane -t demo -e -p | python docs/images/render.py FILE.svg TITLE

Nothing is added to what was captured. `capture.py` starts the commands, and takes all pictures.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100


def write(shown: str, file: Path, title: str) -> None:
    """Writes a terminal's content, with its escape codes, as a picture."""
    console = Console(record=True, width=COLUMNS, force_terminal=True, file=io.StringIO())
    for line in shown.rstrip().splitlines():
        console.print(Text.from_ansi(line), soft_wrap=True)
    console.save_svg(str(file), title=title, unique_id=file.stem)


def main() -> None:
    """Reads the terminal's content from standard input and writes the file that is named."""
    write(sys.stdin.read(), Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "terminal")


if __name__ == "__main__":
    main()
