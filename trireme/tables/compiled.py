"""Functions that numba compiles to machine code: loops for which Python and NumPy are too slow.

A compiled function computes the same bits on every machine, unless it calls the system's
mathematical library (a logarithm, a power). The additions, multiplications, divisions and square
roots of IEEE 754 are rounded correctly, and numba neither reorders them nor contracts a product and
a sum, because `fastmath` is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from trireme.errors import ConfigurationError

try:
    import numba
except ImportError as error:
    raise ConfigurationError(
        "numba is not installed. Tables need it: pip install 'trireme-train[tables]'"
    ) from error

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compiles a function when it is first called, for the types of that call.

    The machine code is kept in the folder `__pycache__` beside the source, or in the user's cache
    where that cannot be written, and loaded by later processes. The compiled function releases the
    global interpreter lock, does not check bounds, and divides by zero as IEEE 754 says.

    numba keeps machine code until the file of the function changes. It does not notice a change in
    a compiled function of another file that is called from here: remove `__pycache__` then.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        made = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the machine code can be written
        made = numba.njit(**options)(function)
    return made  # type: ignore[no-any-return]
