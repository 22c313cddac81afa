"""Batches of keys of a sparse table, drawn at random; peers, too, can import this."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

WIDTH, BATCH = 16, 100_000
"""The columns of a row, and the keys of a batch."""

EXPONENT = 1.05
"""Of Zipf's law."""

Batch = np.ndarray[Any, Any]
"""Keys that may repeat: int64 of shape (BATCH,)."""

Draw = Callable[[np.random.Generator, int], Batch]
"""Returns a batch of keys below a number."""


def uniform(numbers: np.random.Generator, rows: int) -> Batch:
    """Draws each key with the same chance."""
    return numbers.integers(0, rows, BATCH)


def zipf(numbers: np.random.Generator, rows: int, exponent: float = EXPONENT) -> Batch:
    """Draws ranks by Zipf's law over all rows, spread over the keys."""
    power = 1 - exponent
    chance = numbers.random(BATCH)
    ranks = ((rows**power - 1) * chance + 1) ** (1 / power)
    return ranks.astype(np.int64) * 982_451_653 % rows


def draw_by(exponent: float | None) -> Draw:
    """Returns what draws by Zipf's law with an exponent, or uniformly, for None."""
    return uniform if exponent is None else partial(zipf, exponent=exponent)


def gradients() -> np.ndarray[Any, Any]:
    """Returns a gradient for each key of a batch: float32 of shape (BATCH, WIDTH)."""
    return np.random.default_rng(1).standard_normal((BATCH, WIDTH), np.float32)


def batches(draw: Draw, rows: int) -> Callable[[], Batch]:
    """Returns what draws the batches that every contender exchanges, one after the other."""
    numbers = np.random.default_rng(2)
    return lambda: draw(numbers, rows)
