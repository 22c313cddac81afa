"""Records what the processes that hold one model compute, and when: for traces of a schedule."""

from __future__ import annotations

from typing import Any

import msgspec


class StageOperation(msgspec.Struct, frozen=True):
    """One operation of a process: a stage's forward or backward pass of one micro-batch."""

    process: int  # the process's index along the pipeline
    stage: int
    kind: str  # `forward`, `backward`, or `weight` where weights' gradients are computed apart
    microbatch: int
    start: float  # start, stop: in seconds on the wall clock of the host
    stop: float


class OperationLog:
    """What this process computes, recorded while anyone reads, and the `graph` it is of, if any."""

    graph: Any = None

    def __init__(self) -> None:
        self.operations: list[StageOperation] | None = None
        self._readers = 0

    def begin(self) -> int:
        """Begins to record; returns the mark to give to `end`. Several readers may record."""
        if self.operations is None:
            self.operations = []
        self._readers += 1
        return len(self.operations)

    def end(self, mark: int) -> list[StageOperation]:
        """Returns what was recorded since `begin`; the last reader's ends recording."""
        found = (self.operations or [])[mark:]
        self._readers -= 1
        if not self._readers:
            self.operations = None
        return found
