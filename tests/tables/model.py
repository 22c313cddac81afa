"""A table as a dict of rows, in plain numpy: what it does, without how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.tables.numbers import first_rows
from trireme.tables.keys import slots_of
from trireme.tables.table_spec import (
    FTRL,
    SGD,
    Adagrad,
    Add,
    Optimizer,
    RowWiseAdagrad,
    SparseAdam,
    TableSpec,
)


@dataclass
class Row:
    """The row of a key."""

    values: np.ndarray[Any, Any]
    step: int
    touches: int
    state: dict[str, Any] = field(default_factory=dict)


def update(optimizer: Optimizer, row: Row, gradient: np.ndarray[Any, Any], step: int) -> None:
    """One update of one row, as the papers write it."""
    state, values = row.state, row.values
    match optimizer:
        case Add():
            values += gradient
        case SGD(lr):
            values -= values.dtype.type(lr) * gradient
        case RowWiseAdagrad(lr, eps, initial):
            state["sum"] = state.get("sum", initial) + np.mean(gradient**2)
            values -= lr * gradient / (np.sqrt(state["sum"]) + eps)
        case Adagrad(lr, eps, initial):
            state["sum"] = state.get("sum", initial) + gradient**2
            values -= lr * gradient / (np.sqrt(state["sum"]) + eps)
        case SparseAdam(lr, beta1, beta2, eps):
            state["mean"] = beta1 * state.get("mean", 0) + (1 - beta1) * gradient
            state["square"] = beta2 * state.get("square", 0) + (1 - beta2) * gradient**2
            rate = lr * np.sqrt(1 - beta2**step) / (1 - beta1**step)
            values -= rate * state["mean"] / (np.sqrt(state["square"]) + eps)
        case FTRL(alpha, beta, l1, l2):
            z, n = state.get("z", 0.0), state.get("n", 0.0)
            sigma = (np.sqrt(n + gradient**2) - np.sqrt(n)) / alpha
            z, n = z + gradient - sigma * values, n + gradient**2
            state["z"], state["n"] = z, n
            kept = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2)
            values[:] = np.where(np.abs(z) <= l1, 0, kept)


class ModelTable:
    """A table that is right because it is simple."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.optimizer = spec.optimizer
        self.rows: dict[int, Row] = {}
        self.waiting: dict[int, tuple[int, int]] = {}
        self.dropped: list[tuple[int, int]] = []

    def first(self, keys: list[int]) -> np.ndarray[Any, Any]:
        return first_rows(self.spec.initializer, keys, self.spec.width, self.spec.dtype)

    def pull(self, keys: list[int]) -> np.ndarray[Any, Any]:
        rows = self.first(keys)
        for place, key in enumerate(keys):
            if key in self.rows:
                rows[place] = self.rows[key].values
        return rows

    def push(self, keys: list[int], updates: np.ndarray[Any, Any], step: int) -> None:
        for key, gradient in zip(keys, updates, strict=True):
            if key not in self.rows:
                touches = self.waiting.pop(key, (0, 0))[1]
                if touches + 1 < self.spec.admit_after:
                    self.waiting[key] = (step, touches + 1)
                    continue
                self.rows[key] = Row(self.first([key])[0], step, touches)
            row = self.rows[key]
            row.step, row.touches = step, row.touches + 1
            update(self.optimizer, row, gradient, step)

    def drop_unused(self, step: int) -> int:
        if not self.spec.drop_after:
            return 0
        last = {key: row.step for key, row in self.rows.items()}
        last |= {key: at for key, (at, _) in self.waiting.items()}
        gone = [key for key, at in last.items() if step - at >= self.spec.drop_after]
        for key in gone:
            self.rows.pop(key, None)
            self.waiting.pop(key, None)
            self.dropped.append((key, step))
        return len(gone)

    def remove(self, slots: list[int]) -> None:
        for keys in (self.rows, self.waiting):
            for key in [key for key in keys if slot_of(key) in slots]:
                keys.pop(key)  # type: ignore[attr-defined]
        self.dropped = [each for each in self.dropped if slot_of(each[0]) not in slots]


def slot_of(key: int) -> int:
    return int(slots_of(np.array([key], np.int64))[0])
