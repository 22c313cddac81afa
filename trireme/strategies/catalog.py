"""Strategies by the names that the command line gives them."""

from __future__ import annotations

from difflib import get_close_matches

from trireme.errors import ConfigurationError
from trireme.strategies.asynchronous import Async
from trireme.strategies.averaging import Averaging
from trireme.strategies.base import Strategy
from trireme.strategies.collective import FSDP, AllReduce, Collective, Pipeline, Tensor
from trireme.strategies.diloco import DiLoCo
from trireme.strategies.ssp import SSP
from trireme.strategies.synchronous import Sync

__all__ = ["BUILT", "PLANNED", "resolve"]

BUILT = (
    "async",
    "ssp",
    "sync",
    "averaging",
    "diloco",
    "allreduce",
    "fsdp",
    "tensor",
    "pipeline",
)
"""The names that can be used."""

PLANNED = ("graph",)
"""Names that are kept for what is not built yet."""


_COLLECTIVE: dict[str, type[Collective]] = {
    "allreduce": AllReduce,
    "fsdp": FSDP,
    "tensor": Tensor,
    "pipeline": Pipeline,
}


def resolve(
    name: str,
    *,
    aggregate: int | None = None,
    staleness: int | None = None,
    every: int | None = None,
    prefetch: bool = False,
) -> Strategy:
    """Returns the strategy of a name and the command line's options for it.

    Raises:
        ConfigurationError: the name is unknown or not built yet, or an option is not this
            strategy's.
    """
    if name in PLANNED:
        raise ConfigurationError(
            f"strategy {name!r} is not built yet: there are {', '.join(BUILT)}"
        )
    if name not in BUILT:
        close = get_close_matches(name, BUILT, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigurationError(f"unknown strategy {name!r}: {hint}there are {', '.join(BUILT)}")
    if aggregate is not None and name not in ("sync", "diloco"):
        raise ConfigurationError(f"--aggregate {aggregate} is for sync and diloco, not for {name}")
    if staleness is not None and name not in ("ssp", "averaging"):
        raise ConfigurationError(
            f"--staleness {staleness} is for ssp and averaging, not for {name}"
        )
    if every is not None and name not in ("averaging", "diloco"):
        raise ConfigurationError(f"--every {every} is for averaging and diloco, not for {name}")
    if prefetch and name not in ("async", "ssp"):
        raise ConfigurationError(f"--prefetch is for async and ssp, not for {name}")
    if name in _COLLECTIVE:
        return _COLLECTIVE[name]()
    if name == "sync":
        return Sync(aggregate)
    if name == "averaging":
        return Averaging(Averaging.every if every is None else every, staleness)
    if name == "diloco":
        return DiLoCo(DiLoCo.every if every is None else every, aggregate)
    if name == "ssp":
        return SSP(SSP.staleness if staleness is None else staleness, prefetch)
    return Async(prefetch)
