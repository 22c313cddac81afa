"""`python -m trireme` is the `trireme` command."""

from __future__ import annotations

import sys

from trireme.cli import main

if __name__ == "__main__":
    sys.exit(main())
