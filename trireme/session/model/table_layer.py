"""The interface of layers whose rows lie in sparse tables, and of the rows of a model's layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trireme.ps.row_messages import RowKeys, RowUpdates
from trireme.ps.table_spec import TableSpec

Fetch = Callable[[Sequence[RowKeys]], Sequence[Any]]
"""Returns the rows of keys, of shape (n, width) for each entry."""


class TableRows(ABC):
    """The rows that a worker computes with.

    Attributes:
        specs: the tables.
        wanted: the keys whose rows the next push is to bring.
        left: the tables whose rows were in an earlier session.
    """

    specs: tuple[TableSpec, ...]
    wanted: tuple[RowKeys, ...]
    left: Sequence[str]

    @abstractmethod
    def open(self, fetch: Fetch) -> None:
        """Takes the function that returns rows."""

    @abstractmethod
    def close(self) -> None:
        """Forgets that function: the session is left."""

    @abstractmethod
    def forget(self) -> None:
        """Drops the gradients: those of the step before, or where they are not to be used."""

    @property
    def looks_ahead(self) -> bool:
        """Whether the ids of the next batch are known."""
        return False

    def expect(self, data: Any) -> None:
        """Takes the next batch, whose rows the next push is to bring; None for none."""
        raise NotImplementedError(f"{type(self).__name__} does not look ahead")

    @abstractmethod
    def bring(self, rows: Sequence[Any]) -> None:
        """Takes the rows that a push has brought; none where it has brought none."""

    @abstractmethod
    def updates(self) -> tuple[RowUpdates, ...]:
        """Returns the updates of this step."""

    def keys(self) -> dict[str, Any]:
        """Returns the keys of this step, each once, by the name of the table."""
        return {}

    def pull(self, table: str, keys: Any) -> torch.Tensor:
        """Returns the rows of keys of a table, of shape (n, width); the session must be entered."""
        raise NotImplementedError(f"{type(self).__name__} has no rows at hand")

    def square(self) -> float:
        """Returns the squared L2 norm of the gradients of this step."""
        raise NotImplementedError(f"{type(self).__name__} has no gradients")

    def scale(self, factor: float) -> None:
        """Multiplies the gradients of this step."""
        raise NotImplementedError(f"{type(self).__name__} has no gradients")


class TableLayer(nn.Module, ABC):
    """A layer whose rows lie in a sparse table of the job."""

    @classmethod
    @abstractmethod
    def rows_of(cls, layers: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> TableRows:
        """Returns the rows of all such layers of a model, by their paths in it."""


def table_layers(model: nn.Module) -> dict[str, TableLayer]:
    """Returns the layers of a model whose rows lie in sparse tables, by their paths."""
    return {
        path: module for path, module in model.named_modules() if isinstance(module, TableLayer)
    }


def tables_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> TableRows | None:
    """Returns the rows of a model's sparse tables; None where it has none."""
    layers = table_layers(model)
    return next(iter(layers.values())).rows_of(layers, optimizer) if layers else None
