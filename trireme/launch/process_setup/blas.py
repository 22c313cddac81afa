"""The threads of the BLAS that NumPy brings along, which starts them as soon as it is loaded."""

from __future__ import annotations

BLAS_VARIABLE = "OPENBLAS_NUM_THREADS"


def set_blas_threads(text: str) -> None:
    """Sets how many threads each OpenBLAS that this process has loaded uses."""
    if text.isdecimal() and int(text) > 1:
        from threadpoolctl import ThreadpoolController

        ThreadpoolController().select(internal_api="openblas").limit(limits=int(text))
