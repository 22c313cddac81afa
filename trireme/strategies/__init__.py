"""Strategies of distributed training: each is a frozen value, tested against one process."""

from trireme.strategies.asynchronous import Async
from trireme.strategies.averaging import Averaging
from trireme.strategies.base import Strategy
from trireme.strategies.catalog import BUILT, PLANNED, choose, resolve
from trireme.strategies.collective import (
    FSDP,
    AllReduce,
    Collective,
    PipelineParallel,
    TensorParallel,
)
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
    "PipelineParallel",
    "Strategy",
    "Sync",
    "TensorParallel",
    "choose",
    "resolve",
]
