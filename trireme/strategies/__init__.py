"""Ways to spread training over workers: each a frozen value, proven equal to one process."""

from trireme.strategies.asynchronous import Async
from trireme.strategies.averaging import Averaging
from trireme.strategies.base import Strategy
from trireme.strategies.catalog import BUILT, PLANNED, resolve
from trireme.strategies.collective import FSDP, AllReduce, Collective, Pipeline, Tensor
from trireme.strategies.diloco import DiLoCo
from trireme.strategies.ssp import SSP
from trireme.strategies.synchronous import Sync

__all__ = [
    "BUILT",
    "FSDP",
    "PLANNED",
    "SSP",
    "AllReduce",
    "Async",
    "Averaging",
    "Collective",
    "DiLoCo",
    "Pipeline",
    "Strategy",
    "Sync",
    "Tensor",
    "resolve",
]
