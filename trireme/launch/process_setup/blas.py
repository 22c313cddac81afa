"""The threads of the BLAS that NumPy brings along, which starts them as soon as it is loaded."""

from __future__ import annotations

import ctypes
import itertools
from contextlib import suppress

BLAS_VARIABLE = "OPENBLAS_NUM_THREADS"

_NAMES = tuple(
    f"{prefix}openblas_set_num_threads{suffix}"
    for prefix, suffix in itertools.product(("scipy_", ""), ("64_", "", "64"))
)


def set_blas_threads(text: str) -> bool:
    """Sets how many threads each OpenBLAS that this process has loaded uses.

    The libraries are found as threadpoolctl finds them, among the files that the process has
    mapped.

    Args:
        text: the number, as it stands in the environment. Nothing changes if it is none, or 1.

    Returns:
        Whether a library was told.
    """
    if not text.isdecimal() or int(text) <= 1:
        return False
    told = False
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
        for path in paths:
            library = ctypes.CDLL(path)
            for name in _NAMES:
                function = getattr(library, name, None)
                if function is not None:
                    function(int(text))
                    told = True
                    break
    return told
