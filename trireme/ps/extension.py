"""The interface of extra values, which a plug-in adds to a job, such as the rows of sparse tables.

A package registers an `ExtensionType` by an entry point in the group `trireme.extensions`. A
worker of a job with such values shows what they are, and each shard holds its slots of them: they
are updated by pushes, replicated, copied and divided anew with the parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from trireme.plugins import Plugins
from trireme.ps.extra import Extra, ShownExtension
from trireme.ps.snapshot_messages import TensorSpec

Tensors: TypeAlias = Sequence[tuple[TensorSpec, torch.Tensor]]  # tensors of a snapshot

EXTRA = "extra/"  # what the keys of the tensors of extra values begin with in a snapshot


class HeldExtension(ABC):
    """The extra values of one shard.

    Attributes:
        slots: the slots of the shard: [start, stop).
        lacks: how many of the last of these have no values yet, while a replica is filled.
    """

    slots: tuple[int, int]
    lacks: int

    @abstractmethod
    def mismatch(self, extra: Extra) -> str | None:
        """Returns why a request makes no sense here; None where it does."""

    @abstractmethod
    def overfull(self, extra: Extra) -> str | None:
        """Returns why there is no room for updates; None where there is."""

    @abstractmethod
    def mean(self, updates: Sequence[tuple[float, Extra]], scale: float = 1.0) -> Extra:
        """Returns the mean of several workers' updates, each with its weight, which is above 0."""

    @abstractmethod
    def square(self, extra: Extra) -> float:
        """Returns the squared L2 norm of updates."""

    @abstractmethod
    def apply(self, extra: Extra, step: int) -> None:
        """Applies updates, after which the values are those of a step."""

    @abstractmethod
    def pull(self, extra: Extra) -> Extra:
        """Returns the values that a request wants; changes nothing."""

    @abstractmethod
    def status(self) -> dict[str, float | str]:
        """Returns what is held, as numbers of this process's status."""

    @abstractmethod
    def copy(self) -> Tensors:
        """Returns copies of the values with their state: tensors whose keys begin with `EXTRA`."""

    @abstractmethod
    def load(self, tensors: Tensors, step: int) -> None:
        """Replaces all values by those of a snapshot, or of several."""

    @abstractmethod
    def resume(self, before: Sequence[Any] | None, step: int) -> None:
        """Takes the values over from shards that have stopped, and are not used any more.

        Args:
            before: what these shards hold; None where the values come piece by piece: see `fill`.
            step: the global step of the values.
        """

    @abstractmethod
    def piece(self, lacks: int) -> tuple[tuple[int, int], Tensors]:
        """Returns the next slots for a replica that lacks so many of the last, and their values."""

    @abstractmethod
    def fill(self, slots: tuple[int, int], tensors: Tensors) -> None:
        """Takes the values of the next slots over.

        Raises:
            Rejected: others are due, or they are no such values.
        """


class Extension(ABC):
    """What a worker knows of a job's extra values.

    Attributes:
        shown: what it shows the servers.
    """

    shown: ShownExtension

    @abstractmethod
    def joined(self, parts: Sequence[Tensors]) -> Mapping[str, torch.Tensor]:
        """Returns the values in the snapshots of all shards, by name: see `ModelState.extra`."""

    @abstractmethod
    def tensors(
        self, extra: Mapping[str, torch.Tensor], bounds: Sequence[int], shard: int
    ) -> Tensors:
        """Returns what `ModelState.extra` has in the slots of a shard, as tensors to load."""


@dataclass(frozen=True, slots=True)
class ExtensionType:
    """What makes extra values, each as `package.module:name`; its own module imports fast.

    Attributes:
        held: makes a `HeldExtension` of the shown parts, the bounds of shards and a shard's number.
        trained: makes what a worker trains of a model's `ExtensionLayer`s, by their paths in it,
            and the program's optimizer.
        merged: returns the values that a checkpoint's tensors and changes of them are.
        exported: writes the values of a checkpoint to files, for other programs.
        connect: the function `trireme.ps.connect`.
    """

    held: str
    trained: str
    merged: str
    exported: str
    connect: str


EXTENSIONS = Plugins("trireme.extensions", "implementation of", ExtensionType)  # those installed


def of_extension(kind: str, what: str) -> Any:
    """Returns an attribute of an `ExtensionType`, imported.

    Raises:
        ConfigurationError: it is not installed, or a package that it needs is not.
    """
    return EXTENSIONS.imported(kind, what)


def held_extension(shown: ShownExtension, bounds: Sequence[int], shard: int) -> HeldExtension:
    """Returns the extra values of a shard, of which there are none yet."""
    made: HeldExtension = of_extension(shown.kind, "held")(shown.parts, bounds, shard)
    return made
