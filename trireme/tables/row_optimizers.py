"""Row optimizers: how an update changes a row, and what state each row has for it.

Each is a kernel over the records of a batch. It computes in the dtype of the row, element by
element from the left, so that the result does not depend on the processor. The classes of
`trireme.tables.table_spec` name the source of each algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.plugins import Plugins
from trireme.tables.addresses import array_at, read_ahead
from trireme.tables.compiled import compiled
from trireme.tables.row_storage import HEADER_BYTES, touch
from trireme.tables.table_spec import (
    FTRL,
    SGD,
    Adagrad,
    Add,
    Optimizer,
    Plugged,
    RowWiseAdagrad,
    SparseAdam,
)

_HEADER = np.uint64(HEADER_BYTES)
_ZERO, _LINE = np.uint64(0), np.uint64(64)
_AHEAD = 12  # records: what is read ahead is there when its turn comes


@compiled
def row_at(addresses: Any, each: Any, step: Any, size: Any, updates: Any) -> Any:
    """Counts the touch of a record, reads later ones ahead, and returns its row and state."""
    if each + _AHEAD < addresses.size:
        following = addresses[each + _AHEAD]
        read_ahead(following)
        read_ahead(following + _LINE)
        read_ahead(following + _HEADER + np.uint64(size * updates.itemsize - 1))
    touch(addresses[each], step)
    return array_at(addresses[each] + _HEADER, size, updates.dtype)


@compiled
def _sgd(addresses: Any, updates: Any, step: Any, numbers: Any) -> None:
    width = updates.shape[1]
    lr = numbers[0]
    for each in range(addresses.size):
        row = row_at(addresses, each, step, width, updates)
        for column in range(width):
            row[column] -= lr * updates[each, column]


@compiled
def _adagrad(addresses: Any, updates: Any, step: Any, numbers: Any) -> None:
    width = updates.shape[1]
    lr, eps = numbers[0], numbers[1]
    for each in range(addresses.size):
        row = row_at(addresses, each, step, 2 * width, updates)
        for column in range(width):
            gradient = updates[each, column]
            total = row[width + column] + gradient * gradient
            row[width + column] = total
            row[column] -= lr * (gradient / (math.sqrt(total) + eps))


@compiled
def _row_wise_adagrad(addresses: Any, updates: Any, step: Any, numbers: Any) -> None:
    width = updates.shape[1]
    lr, eps, columns = numbers[0], numbers[1], numbers[2]
    for each in range(addresses.size):
        row = row_at(addresses, each, step, width + 1, updates)
        squares = updates[each, 0] * updates[each, 0]
        for column in range(1, width):
            squares += updates[each, column] * updates[each, column]
        total = row[width] + squares / columns
        row[width] = total
        rate = lr / (math.sqrt(total) + eps)
        for column in range(width):
            row[column] -= rate * updates[each, column]


@compiled
def _sparse_adam(addresses: Any, updates: Any, step: Any, numbers: Any) -> None:
    width = updates.shape[1]
    rate, first, second, eps = numbers[0], numbers[1], numbers[2], numbers[3]
    for each in range(addresses.size):
        row = row_at(addresses, each, step, 3 * width, updates)
        for column in range(width):
            gradient = updates[each, column]
            mean, square = row[width + column], row[2 * width + column]
            mean += (gradient - mean) * first
            square += (gradient * gradient - square) * second
            row[width + column] = mean
            row[2 * width + column] = square
            row[column] -= rate * (mean / (math.sqrt(square) + eps))


@compiled
def _ftrl(addresses: Any, updates: Any, step: Any, numbers: Any) -> None:
    width = updates.shape[1]
    alpha, beta, l1, l2 = numbers[0], numbers[1], numbers[2], numbers[3]
    for each in range(addresses.size):
        row = row_at(addresses, each, step, 3 * width, updates)
        for column in range(width):
            gradient = updates[each, column]
            linear, squares = row[width + column], row[2 * width + column]
            total = squares + gradient * gradient
            root = math.sqrt(total)
            sigma = (root - math.sqrt(squares)) / alpha
            linear += gradient - sigma * row[column]
            row[width + column] = linear
            row[2 * width + column] = total
            if abs(linear) <= l1:
                row[column] = 0
            else:
                excess = linear + l1 if linear < 0 else linear - l1
                row[column] = -excess / ((beta + root) / alpha + l2)


def power(base: float, exponent: int) -> float:
    """Returns a number to a whole power, by multiplications: the same bits on all machines."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _adam_numbers(optimizer: SparseAdam, step: int) -> tuple[float, ...]:
    first = 1.0 - power(optimizer.beta1, step)
    second = 1.0 - power(optimizer.beta2, step)
    rate = optimizer.lr * math.sqrt(second) / first
    return rate, 1.0 - optimizer.beta1, 1.0 - optimizer.beta2, optimizer.eps


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    """What a table does with updates under one of the optimizers."""

    # applies updates: (addresses, updates, step, numbers). Each address is a record's, uint64 of
    # shape (n,); updates are of shape (n, width); the step is uint64
    kernel: Callable[..., None]
    row_states: int  # the elements of state of a row, for each of its columns
    states: int  # the elements of state of a row besides
    # what the kernel computes with, of (optimizer, width, step)
    numbers: Callable[[Any, int, int], tuple[float, ...]]

    def state(self, width: int) -> int:
        """Returns the elements of state of a row with so many columns."""
        return self.row_states * width + self.states


ROW_OPTIMIZERS: Mapping[type, RowOptimizer] = {
    SGD: RowOptimizer(_sgd, 0, 0, lambda it, width, step: (it.lr,)),
    Adagrad: RowOptimizer(_adagrad, 1, 0, lambda it, width, step: (it.lr, it.eps)),
    RowWiseAdagrad: RowOptimizer(
        _row_wise_adagrad, 0, 1, lambda it, width, step: (it.lr, it.eps, width)
    ),
    SparseAdam: RowOptimizer(_sparse_adam, 2, 0, lambda it, width, step: _adam_numbers(it, step)),
    FTRL: RowOptimizer(_ftrl, 2, 0, lambda it, width, step: (it.alpha, it.beta, it.l1, it.l2)),
    Add: RowOptimizer(_sgd, 0, 0, lambda it, width, step: (-1,)),  # a descent, upwards
}
"""What a table does under each optimizer of `trireme.tables.table_spec`."""

PLUGGED = Plugins("trireme.row_optimizers", "row optimizer", RowOptimizer)
"""Those of installed packages, which `Plugged` names."""


def row_optimizer(optimizer: Optimizer) -> RowOptimizer:
    """Returns what a table does under an optimizer."""
    if isinstance(optimizer, Plugged):
        return PLUGGED.load(optimizer.name)
    return ROW_OPTIMIZERS[type(optimizer)]


def initial_state(optimizer: Optimizer) -> float:
    """Returns the value of each element of the state of a new row."""
    if isinstance(optimizer, Adagrad):
        return optimizer.initial_accumulator_value
    return 0.0


def apply(
    optimizer: Optimizer, addresses: npt.NDArray[np.uint64], updates: npt.NDArray[Any], step: int
) -> None:
    """Applies updates to the rows at some addresses."""
    entry = row_optimizer(optimizer)
    numbers = entry.numbers(optimizer, updates.shape[1], step)
    entry.kernel(addresses, updates, np.uint64(step), np.array(numbers, updates.dtype))
