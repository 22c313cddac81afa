"""Renders what a terminal showed, colours and all, as an SVG: how the pictures here were made.

    tmux new-session -d -s demo -x 100 -y 34
    tmux send-keys -t demo 'make demo' Enter

then, while it trains:

    tmux capture-pane -t demo -e -p | python docs/images/render.py docs/images/running.svg

Nothing is added to what was captured.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100


def main() -> None:
    """Reads the terminal's content from standard input and writes the file that is named."""
    console = Console(record=True, width=COLUMNS, force_terminal=True, file=io.StringIO())
    for line in sys.stdin.read().rstrip().splitlines():
        console.print(Text.from_ansi(line), soft_wrap=True)
    console.save_svg(sys.argv[1], title="make demo", unique_id=Path(sys.argv[1]).stem)


if __name__ == "__main__":
    main()
