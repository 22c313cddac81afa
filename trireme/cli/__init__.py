"""The command line. Each command reads its options, calls what does the work, says how it was.

Nothing here imports PyTorch before a command needs it.
"""

from trireme.cli.dispatch import main

__all__ = ["main"]
