"""Rows of batches as plain values, to be compared."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sparse_data import SparseBatch

Row = tuple[float, list[tuple[int, float]]]


def rows_of(batches: Iterable[SparseBatch]) -> list[Row]:
    """All rows: a label and (key, value) pairs each."""
    found: list[Row] = []
    for batch in batches:
        bounds = batch.bounds.tolist()
        pairs = list(zip(batch.keys.tolist(), batch.values.tolist(), strict=True))
        assert bounds[0] == 0 and len(batch.offsets) == len(batch.labels)
        for label, start, stop in zip(batch.labels.tolist(), bounds, bounds[1:], strict=False):
            found.append((label, pairs[start:stop]))
    return found


def written(path: Path, text: str | bytes) -> Path:
    """A file of this text."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
