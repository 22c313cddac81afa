"""The options `--check-every` and `--on-corruption`, as their entry points declare them."""

from __future__ import annotations

from typing import Literal

from trireme.job_config import Option, Positive
from trireme.launch.hooks import LaunchHook
from trireme.session.worker.observer import ObserverType

# fmt: off
CHECK_EVERY = LaunchHook(Option("N",
    "compare copies of the values every N global steps, and name what has changed by itself "
    "(default: never)", type=Positive))
ON_CORRUPTION = LaunchHook(Option("WHAT",
    "of values that have changed by themselves: warn, stop the job, or heal them (default warn)",
    type=Literal["warn", "stop", "heal"]))
# fmt: on
WORKERS = ObserverType("trireme.corruption.worker:checks_of")
