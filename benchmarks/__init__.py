"""The benchmark suite: `python -m benchmarks`, or `make bench`."""

import sys
from pathlib import Path

# Examples are imported by the names that they have for each other: numba keeps code by these names.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
