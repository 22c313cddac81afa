"""The command line. Each command reads its options, calls the code that does the work, and reports.

No module here imports PyTorch before a command needs it.
"""

from trireme.cli.dispatch import main

__all__ = ["main"]
