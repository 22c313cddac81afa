"""The strategies of processes that hold one model together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trireme.strategies import Collective


@dataclass(frozen=True)
class AllReduce(Collective):
    """Replicas of the whole model, whose gradients are averaged while backward still runs.

    It equals one process that trains on all their batches together. Source: Li et al., PyTorch
    Distributed (VLDB 2020).
    """

    name: ClassVar[str] = "allreduce"
    axis: ClassVar[str] = "dp"


@dataclass(frozen=True)
class FSDP(Collective):
    """As `AllReduce`, with parameters, gradients and optimizer state sharded over the replicas.

    Source: Rajbhandari et al., ZeRO (SC 2020), stage 3; Zhao et al., PyTorch FSDP (VLDB 2023).
    """

    name: ClassVar[str] = "fsdp"
    axis: ClassVar[str] = "fsdp"


@dataclass(frozen=True)
class TensorParallel(Collective):
    """One replica whose matrices are split over the processes.

    Source: Shoeybi et al., Megatron-LM (2019), section 3.
    """

    name: ClassVar[str] = "tensor"
    axis: ClassVar[str] = "tp"


@dataclass(frozen=True)
class PipelineParallel(Collective):
    """One replica whose layers are split into stages, through which micro-batches pass.

    Source: Huang et al., GPipe (NeurIPS 2019).
    """

    name: ClassVar[str] = "pipeline"
    axis: ClassVar[str] = "pp"
