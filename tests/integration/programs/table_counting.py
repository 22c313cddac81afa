"""Whole numbers are added to rows of a table: the rows count every worker's updates.

Each update adds 1 to a row of the worker, to rows that all workers update, and to rows that nobody
has updated before, so that the table grows. Each worker notes an update before it pushes it, and
again when it is acknowledged, with one write each to a file of its own that outlives it.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

import trireme
from trireme.ps.messages import Applied
from trireme.tables.table_spec import RowWiseAdagrad, Uniform

WIDTH, SHARED, FRESH, FIRST = 6, 40, 300, 1 << 40


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--pause-until", type=Path, help="no pauses once this file exists")
    options = parser.parse_args()

    with trireme.ps.connect(max_steps=options.max_steps) as ps:
        ps.create_table("counts", WIDTH, dtype="int64")
        initializer = Uniform(-1.0, 1.0, seed=3)
        ps.create_table("trained", 3, optimizer=RowWiseAdagrad(lr=0.1), initializer=initializer)
        path = options.out / f"notes-{ps.index}"
        notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        numbers = np.random.default_rng([ps.index, os.getpid()])
        own, shared = np.array([ps.index]), -1 - np.arange(SHARED)
        while not ps.stopping:
            if options.pause and not (options.pause_until and options.pause_until.exists()):
                time.sleep(options.pause)
            fresh = numbers.integers(FIRST, 1 << 62, FRESH)
            keys = np.unique(np.concatenate([own, shared, fresh]))
            rows = ps.pull("counts", keys)
            assert (rows == rows[:, :1]).all(), f"a row was torn: {rows}"
            os.write(notes, b"attempted\n")
            ps.push("counts", keys, np.ones((keys.size, WIDTH), np.int64))
            ps.push("trained", shared, np.ones((SHARED, 3), np.float32))
            verdict = ps.clock().decided
            os.write(notes, b"applied\n" if isinstance(verdict, Applied) else b"stale\n")


main()
