"""The degrees of parallelism of a group of processes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from trireme.errors import ConfigurationError, suggestion

AXES = ("pp", "graph", "dp", "fsdp", "tp")
"""The axes, outermost first: neighbours in rank share a tensor-parallel group."""

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
SCHEDULES = get_args(Schedule)  # in which a pipeline's stages take micro-batches


@dataclass(frozen=True)
class Mesh:
    """How many processes share the work along each axis; 1 everywhere is a single process."""

    pp: int = 1  # pipeline stages, into which the layers are divided
    graph: int = 1  # tasks on which the operations of a dataflow graph are placed
    dp: int = 1  # replicas, each with its own batches, whose gradients are averaged
    fsdp: int = 1  # replicas that share the parameters, gradients and optimizer state
    tp: int = 1  # processes that share each layer's matrices

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ConfigurationError(
                    f"mesh {axis}={getattr(self, axis)}: a degree is a whole number from 1"
                )
        others = [axis for axis in ("pp", "fsdp", "tp") if getattr(self, axis) > 1]
        if self.graph > 1 and others:
            raise ConfigurationError(
                f"mesh graph={self.graph} with {others[0]}={getattr(self, others[0])}: the tasks "
                "of a dataflow graph hold whole parameters; combine graph with dp only"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a text such as `dp=2,tp=2`; an empty text gives a mesh of one process."""
        degrees: dict[str, int] = {}
        for piece in filter(None, (piece.strip() for piece in text.split(","))):
            match = re.fullmatch(r"([a-z]+)\s*=\s*(\d+)", piece)
            if match is None:
                raise ConfigurationError(
                    f"mesh {text!r}: write axis=degree with commas between, such as dp=2,tp=2"
                )
            axis, degree = match[1], int(match[2])
            if axis not in AXES:
                raise ConfigurationError(
                    f"mesh {text!r}: there is no axis {axis!r}{suggestion(axis, AXES)}; there are "
                    f"{', '.join(AXES)}"
                )
            if axis in degrees:
                raise ConfigurationError(f"mesh {text!r}: {axis} is named twice")
            degrees[axis] = degree
        return cls(**degrees)

    def __str__(self) -> str:
        """As `parse` reads it; empty for one process."""
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1)

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.parts * self.dp * self.fsdp * self.tp

    @property
    def parts(self) -> int:
        """The number of parts into which the layers are divided, along pp or graph."""
        return self.pp * self.graph

    @property
    def replicas(self) -> int:
        """The number of batches that are computed at a time, along dp and fsdp."""
        return self.dp * self.fsdp

    @property
    def sharded(self) -> bool:
        """Whether a process holds less than the whole model."""
        return self.parts * self.fsdp * self.tp > 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of a rank on each axis."""
        coordinates: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return coordinates

    def replica(self, rank: int) -> int:
        """Returns the index of this rank's batch among those that are computed at a time."""
        coordinates = self.coordinates(rank)
        return coordinates["dp"] * self.fsdp + coordinates["fsdp"]

    def check_processes(self, processes: int) -> None:
        """Checks that the size of the mesh is the number of processes."""
        if self.size != processes:
            rest = self.size // self.dp
            fits = processes % rest == 0
            near = replace(self, dp=processes // rest) if fits else Mesh(dp=processes)
            raise ConfigurationError(
                f"the mesh {str(self) or 'of one process'} is of {self.size} processes, and there "
                f"are {processes} processes: start {self.size}, or use --mesh {near}"
            )
