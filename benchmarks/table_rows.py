"""Memory and speed of sparse tables: `python -m benchmarks.table_rows`.

A table of rows of 16 float32 with row-wise Adagrad is filled by pushes of 100,000 new keys. Then
batches of 100,000 random keys, uniform and by Zipf's law, are deduplicated, pulled and pushed. The
limit is the same deduplication, gather, update and scatter on one flat array, whose row numbers are
the keys, so that nothing is searched for: once by plain loops, and once by loops that read rows
ahead, as those of the table do. All take turns; times are of the processor.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.key_draws import BATCH, WIDTH, uniform, zipf
from trireme.tables.addresses import read_ahead
from trireme.tables.compiled import compiled
from trireme.tables.keys import unique
from trireme.tables.table import Table, prepare
from trireme.tables.table_spec import RowWiseAdagrad, TableSpec, Uniform

AHEAD, NEVER = 16, 1 << 40
_ROW_BYTES, _ITEM_BYTES, _ONE = np.uint64(4 * WIDTH), np.uint64(4), np.uint64(1)
OPTIMIZER = RowWiseAdagrad(lr=0.01)
SPEC = TableSpec("rows", WIDTH, OPTIMIZER, initializer=Uniform(-0.01, 0.01))


@compiled
def _read_ahead(rows: Any, sums: Any, number: Any) -> None:
    row = rows + np.uint64(number) * _ROW_BYTES
    read_ahead(row)
    read_ahead(row + _ROW_BYTES - _ONE)
    read_ahead(sums + np.uint64(number) * _ITEM_BYTES)


@compiled
def gather(rows: Any, sums: Any, numbers: Any, out: Any, ahead: Any) -> None:
    at, at_sums = np.uint64(rows.ctypes.data), np.uint64(sums.ctypes.data)
    for each in range(numbers.size):
        if each + ahead < numbers.size:
            _read_ahead(at, at_sums, numbers[each + ahead])
        for column in range(rows.shape[1]):
            out[each, column] = rows[numbers[each], column]


@compiled
def update(
    rows: Any, sums: Any, numbers: Any, gradients: Any, lr: Any, eps: Any, ahead: Any
) -> None:
    columns = np.float32(rows.shape[1])
    at, at_sums = np.uint64(rows.ctypes.data), np.uint64(sums.ctypes.data)
    for each in range(numbers.size):
        if each + ahead < numbers.size:
            _read_ahead(at, at_sums, numbers[each + ahead])
        number = numbers[each]
        squares = gradients[each, 0] * gradients[each, 0]
        for column in range(1, rows.shape[1]):
            squares += gradients[each, column] * gradients[each, column]
        total = sums[number] + squares / columns
        sums[number] = total
        rate = lr / (np.sqrt(total) + eps)
        for column in range(rows.shape[1]):
            rows[number, column] -= rate * gradients[each, column]


def peak_bytes() -> int:
    """The most memory that this process has had at a time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def filled(rows: int) -> Table:
    """Makes a table of so many rows, and prints what that takes."""
    prepare(SPEC)
    gradients = np.random.default_rng(0).standard_normal((BATCH, WIDTH), np.float32)
    table, before, longest = Table(SPEC), peak_bytes(), 0.0
    began = time.process_time()
    for step, first in enumerate(range(0, rows, BATCH), start=1):
        keys = np.arange(first, min(rows, first + BATCH))
        pushed = time.process_time()
        table.push(keys, gradients[: keys.size], step=step)
        longest = max(longest, time.process_time() - pushed)
    seconds = time.process_time() - began
    peak, own = peak_bytes(), table.statistics.bytes
    print(
        f"{rows:,} rows in {seconds:.1f} s, the longest push {longest * 1e3:.0f} ms; peak "
        f"{peak / 1e9:.2f} GB, of which the table {(peak - before) / rows:.1f} bytes a row "
        f"({own / rows:.1f} allocated)",
        flush=True,
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="?", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=40, help="0: only the memory")
    options = parser.parse_args()
    table = filled(options.rows)
    if options.rounds == 0:
        return
    rows = np.ones((options.rows, WIDTH), np.float32)
    sums = np.ones(options.rows, np.float32)
    out = np.empty((BATCH, WIDTH), np.float32)
    numbers = np.random.default_rng(1)
    gradients = numbers.standard_normal((BATCH, WIDTH), np.float32)
    lr, eps = np.float32(OPTIMIZER.lr), np.float32(OPTIMIZER.eps)

    def of_table(batch: np.ndarray[Any, Any]) -> None:
        keys, _ = unique(batch)
        table.pull(keys, out[: keys.size])
        table.push(keys, gradients[: keys.size], step=1)

    def of_array(batch: np.ndarray[Any, Any], ahead: int = NEVER) -> None:
        keys, _ = unique(batch)
        gather(rows, sums, keys, out[: keys.size], ahead)
        update(rows, sums, keys, gradients[: keys.size], lr, eps, ahead)

    def seconds(contender: Callable[[np.ndarray[Any, Any]], None], draw: Any) -> float:
        batch = draw(numbers, options.rows)
        began = time.process_time()
        contender(batch)
        return time.process_time() - began

    for draw in (uniform, zipf):
        contenders = (of_table, of_array, partial(of_array, ahead=AHEAD))
        rounds = [[seconds(each, draw) for each in contenders] for _ in range(options.rounds + 1)][
            1:
        ]
        medians = [statistics.median(each) * 1e3 for each in zip(*rounds, strict=True)]
        plain, ahead = (statistics.median(each[0] / each[i] for each in rounds) for i in (1, 2))
        print(
            f"{draw.__name__}: {medians[0]:.1f} ms; the limit by plain loops {medians[1]:.1f} ms, "
            f"ratio {plain:.2f}; reading ahead {medians[2]:.1f} ms, ratio {ahead:.2f}"
        )


if __name__ == "__main__":
    main()
