"""Strategies of distributed training: each is a frozen value, tested against one process."""

from trireme.strategies.base import Strategy
from trireme.strategies.catalog import BUILT, PLANNED, choose, resolve
from trireme.strategies.collective import (
    FSDP,
    AllReduce,
    Collective,
    PipelineParallel,
    TensorParallel,
)
from trireme.strategies.parameter_server import SSP, Async, Averaging, DiLoCo, Sync

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
