"""Updates that a program of the bare parameter server has pushed since the last clock, as rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trireme.errors import ConfigurationError
from trireme.session.model.extension import Fetch
from trireme.tables.job.requests import RowRequest, RowUpdates
from trireme.tables.job.table_extension import TableExtension
from trireme.tables.keys import sum_rows, unique
from trireme.tables.table_spec import Add, TableSpec

Array = npt.NDArray[Any]

_BLOCK = 1024  # A vector lies in rows of so many elements, at most


DType = npt.DTypeLike | torch.dtype


def name_of(dtype: Any) -> str:
    """Returns the name of a dtype of numpy or torch, such as float32; the text of anything else."""
    if dtype is None or isinstance(dtype, str | torch.dtype):
        return str(dtype).removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return str(dtype)


class ArrayRows:
    """An array of one or two dimensions, and the rows in which it lies."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        vector = len(shape) == 1
        self.width = min(shape[0], _BLOCK) if vector else shape[1]
        self.rows = -(-shape[0] // self.width) if vector else shape[0]

    def joined(self, rows: Array) -> Array:
        return rows.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)

    def divided(self, array: Array) -> Array:
        flat = np.zeros(self.rows * self.width, array.dtype)
        flat[: array.size] = array.reshape(-1)
        return flat.reshape(self.rows, self.width)


class PushedRows(TableExtension):
    """The updates since the last clock; what a worker sends of them, and fetches."""

    def __init__(self) -> None:
        self.specs: tuple[TableSpec, ...] = ()
        self.fetch: Fetch | None = None
        self._pushed: dict[int, list[tuple[Array, Array]]] = {}

    def open(self, fetch: Fetch, step: int) -> str:
        self.fetch = fetch
        return ""

    def close(self) -> None:
        self.fetch = None

    def forget(self) -> None:
        self._pushed.clear()

    def bring(self, values: Any) -> None:
        """Takes no rows: none are wanted."""

    def add(self, place: int, keys: Array, rows: Array) -> None:
        self._pushed.setdefault(place, []).append((keys, rows))

    @property
    def adds(self) -> list[str]:
        """The names of what has updates that are added, which no weight applies to."""
        specs = (self.specs[place] for place in sorted(self._pushed))
        return [spec.name for spec in specs if isinstance(spec.optimizer, Add)]

    def request(self) -> RowRequest:
        """Returns the sums of the updates by key, one entry for each table."""
        found = []
        for place, several in sorted(self._pushed.items()):
            keys, inverse = unique(np.concatenate([keys for keys, _ in several]))
            rows = np.ascontiguousarray(np.concatenate([rows for _, rows in several]))
            sums = sum_rows(rows, inverse, keys.size)
            if keys.size < len(rows) and not np.isfinite(sums).all():
                spec = self.specs[place]
                raise ConfigurationError(
                    f"clock(): updates of {spec.name!r} for one key add up to infinity in "
                    f"{spec.dtype}"
                )
            found.append(RowUpdates(place, keys, sums))
        return RowRequest(self.specs, found)
