"""The degrees of parallelism of a group of processes, as one value that is checked when made."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Self

from trireme.errors import ConfigurationError

__all__ = ["AXES", "SCHEDULES", "Mesh"]

AXES = ("pp", "dp", "fsdp", "tp")
"""The axes, outermost first: neighbours in rank share a tensor-parallel group."""

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
"""In which order the stages of a pipeline work off their micro-batches."""


@dataclass(frozen=True)
class Mesh:
    """How many processes share the work along each axis; 1 everywhere is a single process.

    Attributes:
        pp: pipeline stages: the layers are cut into so many pieces.
        dp: data-parallel replicas: each computes on its own batches, gradients are averaged.
        fsdp: data-parallel too, with parameters, gradients and optimizer state cut into so many
            shards.
        tp: tensor-parallel: so many processes share each layer's matrices.

    Raises:
        ConfigurationError: a degree is below 1.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ConfigurationError(
                    f"mesh {axis}={getattr(self, axis)}: a degree is a whole number from 1"
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `dp=2,tp=2`; nothing gives a mesh of one process.

        Raises:
            ConfigurationError: an axis is unknown, named twice, or its degree is no number from 1.
        """
        degrees: dict[str, int] = {}
        for piece in filter(None, (piece.strip() for piece in text.split(","))):
            match = re.fullmatch(r"([a-z]+)\s*=\s*(\d+)", piece)
            if match is None:
                raise ConfigurationError(
                    f"mesh {text!r}: write axis=degree with commas between, such as dp=2,tp=2"
                )
            axis, degree = match[1], int(match[2])
            if axis not in AXES:
                close = get_close_matches(axis, AXES, 1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise ConfigurationError(
                    f"mesh {text!r}: there is no axis {axis!r}; {hint}there are {', '.join(AXES)}"
                )
            if axis in degrees:
                raise ConfigurationError(f"mesh {text!r}: {axis} is named twice")
            degrees[axis] = degree
        return cls(**degrees)

    def __str__(self) -> str:
        """As `parse` reads it; empty for one process."""
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1)

    @property
    def text(self) -> str:
        """The degrees, for people."""
        return str(self) or "of one process"

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.pp * self.dp * self.fsdp * self.tp

    @property
    def replicas(self) -> int:
        """How many batches are computed at a time: along dp and fsdp."""
        return self.dp * self.fsdp

    @property
    def sharded(self) -> bool:
        """Whether a process holds less than the whole model."""
        return self.pp * self.fsdp * self.tp > 1

    def times(self, axis: str, degree: int) -> Mesh:
        """Returns the mesh with `degree` times as many processes along an axis."""
        assert axis in {field.name for field in fields(self)}
        return replace(self, **{axis: getattr(self, axis) * degree})

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns where a rank stands on each axis."""
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def replica(self, rank: int) -> int:
        """Returns which of the batches that are computed at a time is this rank's."""
        place = self.coordinates(rank)
        return place["dp"] * self.fsdp + place["fsdp"]

    def check_processes(self, processes: int) -> None:
        """Checks that the mesh has as many places as there are processes.

        Raises:
            ConfigurationError: it has not; names the nearest mesh that has.
        """
        if self.size != processes:
            rest = self.size // self.dp
            fits = processes % rest == 0
            near = replace(self, dp=processes // rest) if fits else Mesh(dp=processes)
            raise ConfigurationError(
                f"the mesh {self.text} has {self.size} places and there are "
                f"{processes} processes: start {self.size}, or use --mesh {near}"
            )

    def check_inside(self) -> None:
        """Checks that the mesh can be the inside of one worker of a job with parameter servers.

        Raises:
            ConfigurationError: there is data parallelism in it, which workers are for.
        """
        if self.replicas > 1:
            workers = self.replicas
            model = Mesh(pp=self.pp, tp=self.tp)
            inside = f"--mesh {model}" if model.size > 1 else "without --mesh"
            raise ConfigurationError(
                f"mesh {self}: with parameter servers, data parallelism is between the workers: "
                f"use {workers} times as many workers, {inside}"
            )
