"""Device time, emulated: a sleep to an absolute deadline where a device would compute.

The bytes, the servers and the processes are real; only the seconds of forward and backward are
slept. So many more workers fit on a few cores than would compute there, and what is seen is what
pushes and pulls add. The sleep ends at a time that was fixed before it began, so that what the
host does meanwhile, and a late wake-up, do not add up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np


def sleep_until(deadline: float) -> None:
    """Sleeps until `time.perf_counter()` says so; not at all where that is past."""
    left = deadline - time.perf_counter()
    if left > 0:
        time.sleep(left)


@dataclass(frozen=True)
class Device:
    """One worker's device.

    Attributes:
        seconds: how long a step takes on it, on average.
        jitter: the standard deviation of the logarithm of a step's time; 0 for none.
        seed: of the jitter.
    """

    seconds: float
    jitter: float = 0.0
    seed: int = 0

    def times(self, count: int) -> list[float]:
        """Returns the seconds of the first steps: lognormal, with the mean that it should have."""
        random = np.random.default_rng(self.seed)
        drawn = random.normal(-(self.jitter**2) / 2, self.jitter, count)
        return [float(value) for value in self.seconds * np.exp(drawn)]
