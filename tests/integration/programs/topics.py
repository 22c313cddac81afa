"""Topics of planted documents, whose worker 1 kills itself in the middle of an update."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from lda import SharedTopics
from lda.planted import planted_topics

import trireme
from trireme.tables.job.connection import Connection


class Deadly:
    """A connection that kills its process at some clocks, each once for all processes.

    Args:
        ps: the connection.
        kills: at which clock of a process, and when: "before" it is sent, or "after" it is applied
            and before anybody hears of it.
        out: where is noted which have happened.
    """

    def __init__(self, ps: Connection, kills: list[str], out: Path) -> None:
        self._ps, self._kills, self._out, self._clocks = ps, kills, out, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ps, name)

    def clock(self) -> Any:
        self._clocks += 1
        self._die("before")
        result = self._ps.clock()
        self._die("after")
        return result

    def _die(self, when: str) -> None:
        name = f"{self._clocks}:{when}"
        if name in self._kills and not (self._out / name).exists():
            (self._out / name).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweeps", type=int, required=True)
    parser.add_argument("--kill", action="append", default=[])
    parser.add_argument("--every-steps", type=int, help="saves so often, and not only at the end")
    parser.add_argument("--patience", type=float, default=120.0)
    options = parser.parse_args()
    documents = planted_topics(6, 60, 200, length=30).documents
    checkpoint = trireme.Checkpoint(every_steps=options.every_steps, every_seconds=None, keep=100)
    with trireme.ps.connect("run", checkpoint=checkpoint) as ps:
        deadly = Deadly(ps, options.kill if ps.index == 1 else [], options.out)
        shared = SharedTopics(deadly, documents, 6, beta=0.05, block_tokens=300)
        while shared.advance(options.sweeps):
            pass
        shared.finish(options.sweeps, patience=options.patience)
        if ps.is_chief:
            words = np.arange(len(documents.vocabulary))
            keys = np.arange(1000)
            np.savez(
                options.out / "found.npz",
                counts=shared.rows(words),
                totals=shared.totals(),
                sweeps=ps.pull("sweeps"),
                assignments=ps.pull("assignments", keys),
                words=documents.words,
            )


main()
