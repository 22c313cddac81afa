"""Strategies without parameter servers: the processes hold the model together.

They differ in the axis of the mesh along which workers are added; `--mesh` composes them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from trireme.cluster.mesh import Mesh
from trireme.errors import ConfigurationError
from trireme.ps.rule import Rule
from trireme.strategies.base import Strategy

__all__ = ["FSDP", "AllReduce", "Collective", "Pipeline", "Tensor"]


class Collective(Strategy):
    """What they have in common: every step is one of all processes together.

    Attributes:
        axis: along which workers are added.
    """

    axis: ClassVar[str]

    def rule(self) -> Rule:
        """Returns the rule: rounds of one update of every replica."""
        return Rule(aggregate=0, staleness=0)

    def check(self, *, workers: int, servers: int) -> None:
        """Checks that there are no parameter servers.

        Raises:
            ConfigurationError: there are some.
        """
        if servers:
            raise ConfigurationError(
                f"strategy {self.name} has no parameter servers, and there are {servers}: leave "
                "out --ps, or choose async, sync or ssp, with --mesh for what is inside a worker"
            )

    def mesh(self, inside: Mesh, processes: int) -> Mesh:
        """Returns the mesh of the whole job.

        Args:
            inside: the degrees that the launch gave.
            processes: how many processes there are.

        Raises:
            ConfigurationError: the processes do not fill the mesh.
        """
        workers, rest = divmod(processes, inside.size)
        if rest or not workers:
            inside.check_processes(processes)
        return inside.times(self.axis, workers)

    @abstractmethod
    def about(self) -> str:
        """Returns what it does, in a few words."""


@dataclass(frozen=True)
class AllReduce(Collective):
    """Replicas of the whole model, whose gradients are averaged while backward still runs.

    It equals one process that trains on all their batches together. Source: Li et al., PyTorch
    Distributed (VLDB 2020).
    """

    name: ClassVar[str] = "allreduce"
    axis: ClassVar[str] = "dp"

    def about(self) -> str:
        return "replicas whose gradients are averaged"


@dataclass(frozen=True)
class FSDP(Collective):
    """As `AllReduce`, with parameters, gradients and optimizer state cut over the replicas.

    Source: Rajbhandari et al., ZeRO (SC 2020), stage 3; Zhao et al., PyTorch FSDP (VLDB 2023).
    """

    name: ClassVar[str] = "fsdp"
    axis: ClassVar[str] = "fsdp"

    def about(self) -> str:
        return "replicas over which parameters are cut"


@dataclass(frozen=True)
class Tensor(Collective):
    """One replica whose matrices are cut over the processes.

    Source: Shoeybi et al., Megatron-LM (2019), section 3.
    """

    name: ClassVar[str] = "tensor"
    axis: ClassVar[str] = "tp"

    def about(self) -> str:
        return "one replica whose matrices are cut"


@dataclass(frozen=True)
class Pipeline(Collective):
    """One replica whose layers are cut into stages, through which micro-batches pass.

    Source: Huang et al., GPipe (NeurIPS 2019).
    """

    name: ClassVar[str] = "pipeline"
    axis: ClassVar[str] = "pp"

    def about(self) -> str:
        return "one replica whose layers are cut into stages"
