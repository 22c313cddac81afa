"""The command line. Each command reads its options, calls the code that does the work, and reports.

No module here imports PyTorch before a command needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; Ctrl-C during the imports too ends it so."""
    try:
        from trireme.cli.dispatch import dispatch

        return dispatch(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("trireme: interrupted", file=sys.stderr)
        return 130
