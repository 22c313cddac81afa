"""Arrays as kernels take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the array, or a copy where it has gaps, is read-only or lies at an odd address.

    Kernels are compiled ahead for arrays without these properties.
    """
    usable: npt.NDArray[Any] = np.require(array, requirements=["C", "A", "W"])
    return usable
