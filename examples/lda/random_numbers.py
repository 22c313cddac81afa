"""Random numbers in kernels, whose state is handed in: SplitMix64 (Steele et al., OOPSLA 2014)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trireme.tables.compiled import compiled

State = npt.NDArray[np.uint64]
"""The state of a generator: uint64 of shape (1,)."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE_OF_2_53 = 2.0**-53


@compiled
def uniform(state: State) -> float:
    """Returns the next number, uniform in [0, 1)."""
    state[0] += _GOLDEN
    mixed = state[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return float(mixed >> np.uint64(11)) * _ONE_OF_2_53
