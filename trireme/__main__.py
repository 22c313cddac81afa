"""`python -m trireme` is the `trireme` command."""

from __future__ import annotations

import sys

from trireme.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
