"""The operations of a pipeline's processes, with their times: for pictures of a schedule."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class StageOperation(msgspec.Struct, frozen=True):
    """One operation of a process: a stage's forward or backward pass of one micro-batch."""

    process: int  # the process's index along the pipeline
    stage: int  # the number of the stage
    # `forward`, `backward`, or `weight` where the gradients of weights are computed apart
    kind: str
    microbatch: int  # the number of the micro-batch
    start: float  # start, stop: when it began and ended, in seconds on the wall clock of the host
    stop: float


def bubble_fraction(operations: Sequence[StageOperation]) -> float:
    """Returns the fraction of the processes' time, from first to last operation, that is idle."""
    if not operations:
        raise ValueError("no operations were recorded")
    span = max(one.stop for one in operations) - min(one.start for one in operations)
    processes = len({one.process for one in operations})
    busy = sum(one.stop - one.start for one in operations)
    return max(0.0, 1 - busy / (span * processes)) if span else 0.0
