"""The strategies of processes that hold one model together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from trireme.errors import ConfigurationError
from trireme.mesh import Mesh
from trireme.ps.rule import Rule
from trireme.strategies import Strategy


class Collective(Strategy):
    """Base class of strategies without parameter servers: processes train with collectives.

    All processes make every step together. The strategies differ in the axis of the mesh to which
    workers are added; `--mesh` composes them.
    """

    axis: ClassVar[str]  # of the mesh

    def rule(self) -> Rule:
        return Rule(aggregate=0, staleness=0)

    def check(self, *, workers: int, servers: int) -> None:
        if servers:
            raise ConfigurationError(
                f"strategy {self.name} has no parameter servers, and there are {servers}: leave "
                "out --ps, or choose async, sync or ssp for the servers, and for the processes of "
                f"each worker use --mesh {self.axis}=2"
            )

    def mesh(self, inside: Mesh, processes: int) -> Mesh:
        workers, rest = divmod(processes, inside.size)
        if rest or not workers:
            inside.check_processes(processes)
        return replace(inside, **{self.axis: getattr(inside, self.axis) * workers})


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
