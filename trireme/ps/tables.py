"""The interface of sparse tables: a shard's rows, and the division of requests among shards.

What implements it is a part of Trireme of its own, which is loaded where a job has tables.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from trireme.plugins import Plugins
from trireme.ps.joined_table import JoinedTable
from trireme.ps.row_messages import Data, RowKeys, RowUpdates
from trireme.ps.snapshot_messages import TensorSpec
from trireme.ps.table_spec import TableSpec

Rows: TypeAlias = npt.NDArray[Any]
"""Rows of a table, of shape (n, width)."""

Tensors: TypeAlias = Sequence[tuple[TensorSpec, torch.Tensor]]
"""Tensors of a snapshot."""

Space = Callable[[int, int], memoryview]
"""Returns memory for so many bytes of what is sent to a shard."""


class ShardTables(ABC):
    """All tables of one shard.

    Attributes:
        specs: the tables, in the order in which the workers have shown them.
        changes_after: the step after which all changes are known, those included that drop keys.
        slots: the slots of the shard: [start, stop).
        lacks: how many of the last of these have no rows yet, while a replica is filled.
    """

    specs: tuple[TableSpec, ...]
    slots: tuple[int, int]
    lacks: int
    changes_after: int

    @abstractmethod
    def mismatch(self, updates: Sequence[RowUpdates | RowKeys]) -> str | None:
        """Returns why updates or keys make no sense here; None where they do."""

    @abstractmethod
    def overfull(self, updates: Sequence[RowUpdates]) -> str | None:
        """Returns why a table has no room for the keys of updates; None where it has."""

    @abstractmethod
    def apply(self, updates: Sequence[RowUpdates], step: int) -> None:
        """Applies updates, after which the values are those of a step."""

    @abstractmethod
    def pull(self, wanted: Sequence[RowKeys]) -> tuple[bytes | None, ...]:
        """Returns the rows of keys, one answer for each entry; changes nothing.

        An answer is None where the rows are written to memory at hand: see `RowKeysInto`.
        """

    @abstractmethod
    def status(self) -> dict[str, float | str]:
        """Returns what the first tables hold, and what has happened to them in this process."""

    @abstractmethod
    def copy(
        self, since: int | None = None, *, shown: bool = True
    ) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns copies of rows with their state, as tensors of a snapshot.

        Args:
            since: None for all rows; else the step after which what has changed is wanted, not
                before `changes_after`. Nobody will ask for changes after an earlier step.
            shown: whether anybody sees them; else nothing is copied.
        """

    @abstractmethod
    def load(self, tensors: Tensors, step: int) -> None:
        """Replaces all rows by those of a snapshot, or of several, whose keys are the shard's."""

    @abstractmethod
    def resume(self, before: Sequence[Any] | None, step: int) -> None:
        """Takes the rows over from shards that have stopped, and are not used any more.

        Args:
            before: the tables of these shards, which are all of the same specifications; None
                where the rows come piece by piece: see `fill`.
            step: the global step of the rows.
        """

    @abstractmethod
    def piece(self, lacks: int) -> tuple[tuple[int, int], Tensors]:
        """Returns the next rows for a replica that lacks so many of the last slots."""

    @abstractmethod
    def fill(self, slots: tuple[int, int], tensors: Tensors) -> None:
        """Takes the rows of the next slots over.

        Raises:
            Rejected: others are due, or they are no rows of these tables.
        """


class Parts(ABC):
    """Updates and wanted keys of one request, divided among the shards."""

    @abstractmethod
    def nbytes(self, shard: int) -> int:
        """Returns how many bytes a shard's part takes, with the rows that its answer brings."""

    @abstractmethod
    def of_shard(
        self, shard: int, space: Space = ...
    ) -> tuple[tuple[RowUpdates, ...], tuple[RowKeys, ...]]:
        """Returns a shard's part of the updates and of the keys; parts may be empty."""

    @abstractmethod
    def united(self, answers: Sequence[Sequence[bytes | None]]) -> list[Rows]:
        """Returns the rows of the wanted keys in their order, each a new array of shape (n, width).

        Raises:
            FrameError: an answer is of another size.
        """


class TableSupport(ABC):
    """Makes what a job with sparse tables needs. `bounds` are those of a layout; None for one."""

    @abstractmethod
    def shard(
        self, specs: Sequence[TableSpec], bounds: Sequence[int] | None, shard: int
    ) -> ShardTables:
        """Returns the empty tables of a shard."""

    @abstractmethod
    def parts(
        self,
        rows: Sequence[RowUpdates],
        wanted: Sequence[RowKeys],
        specs: Sequence[TableSpec],
        bounds: Sequence[int],
    ) -> Parts:
        """Divides updates and wanted keys among the shards."""

    @abstractmethod
    def packed(self, updates: RowUpdates, spec: TableSpec, codec: str) -> RowUpdates:
        """Returns updates, packed as a table's are where pushes are packed by a codec."""

    @abstractmethod
    def mean(
        self,
        updates: Sequence[tuple[float, Sequence[RowUpdates]]],
        specs: Sequence[TableSpec],
        scale: float = 1.0,
    ) -> tuple[RowUpdates, ...]:
        """Returns the weighted mean of several workers' updates; sums of those that are added."""

    @abstractmethod
    def square(self, updates: Sequence[RowUpdates], specs: Sequence[TableSpec]) -> float:
        """Returns the sum of the squares of all elements of updates that are means, in float64."""

    @abstractmethod
    def rows(self, data: Data, spec: TableSpec) -> Rows:
        """Returns the rows of a message, of shape (n, width), as a view."""

    @abstractmethod
    def joined(self, parts: Sequence[Tensors]) -> dict[str, JoinedTable]:
        """Returns each table in the snapshots of all shards, in the order of its keys."""

    @abstractmethod
    def tensors(
        self,
        tables: Mapping[str, Mapping[str, torch.Tensor]],
        bounds: Sequence[int] | None,
        shard: int,
    ) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns what tables have in the slots of a shard, as tensors to load."""

    @abstractmethod
    def state_width(self, spec: TableSpec) -> int:
        """Returns how many elements of the optimizer's state each row has."""


@dataclass(frozen=True, slots=True)
class TablesType:
    """What makes tables. Its module should import fast.

    Attributes:
        open: the class derived from `TableSupport`, as `package.module:class`.
        connect: the function `trireme.ps.connect`, as `package.module:function`.
    """

    open: str
    connect: str


TABLES = Plugins("trireme.tables", "implementation of", TablesType)
"""What makes tables, under the name `tables`."""


@cache
def table_support() -> TableSupport:
    """Returns what makes tables.

    Raises:
        ConfigurationError: it is not installed, or numba is not.
    """
    made: TableSupport = pkgutil.resolve_name(TABLES.load("tables").open)()
    return made
