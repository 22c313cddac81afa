"""Values of a bare server in memory, for the topics that share them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Answer:
    """What a clock returns."""

    applied: bool


class Stored:
    """What the servers have: rows of integers by the name of a table and a key."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], np.ndarray] = {}
        self.life = 0
        self.clocks = 0

    def copy(self) -> dict[tuple[str, int], np.ndarray]:
        return copy.deepcopy(self.rows)


class Memory:
    """One worker's connection to them.

    Args:
        stored: what the servers have.
        index: this worker.
        workers: how many there are.
        clock: given the number of the update and a function that applies it, says what the worker
            is told.
    """

    def __init__(
        self,
        stored: Stored,
        index: int = 0,
        workers: int = 1,
        clock: Callable[[int, Callable[[], None]], bool] | None = None,
    ) -> None:
        self.index, self.workers, self.stopping = index, workers, False
        self.interrupted = False
        self.stored = stored
        self._clock = clock or self._applied
        self._shapes: dict[str, tuple[int, Any]] = {}
        self._tables: dict[str, tuple[int, Any]] = {}
        self._pushed: list[tuple[str, Any, Any]] = []

    @property
    def life(self) -> int:
        return self.stored.life

    def create(self, name: str, shape: Any, *, dtype: str = "float32") -> None:
        self._shapes[name] = shape, dtype

    def create_table(self, name: str, width: int, *, dtype: str = "float32") -> None:
        self._tables[name] = width, dtype

    def pull(self, name: str, keys: Any = None) -> np.ndarray:
        if keys is None:
            shape, dtype = self._shapes[name]
            return self.stored.rows.get((name, 0), np.zeros(shape, dtype)).copy()
        width, dtype = self._tables[name]
        empty = np.zeros(width, dtype)
        rows = [self.stored.rows.get((name, int(key)), empty) for key in keys]
        return np.array(rows, dtype).reshape(len(keys), width)

    def push(self, name: str, *what: Any) -> None:
        keys = [0] if len(what) == 1 else what[0]
        rows = [what[0]] if len(what) == 1 else what[1]
        self._pushed += [(name, key, row.copy()) for key, row in zip(keys, rows, strict=True)]

    def clock(self) -> Answer:
        self.stored.clocks += 1
        told = self._clock(self.stored.clocks, self._apply)
        self._pushed.clear()
        return Answer(told)

    def end(self) -> None:
        """Nobody waits for this worker in memory."""

    def finish(self) -> None:
        """Nor does it wait for others."""

    def _apply(self) -> None:
        for name, key, row in self._pushed:
            place = name, int(key)
            self.stored.rows[place] = self.stored.rows.get(place, np.zeros_like(row)) + row

    @staticmethod
    def _applied(_: int, apply: Callable[[], None]) -> bool:
        apply()
        return True
