"""The operations of a pipeline's processes, with their times: for traces of a schedule."""

from __future__ import annotations

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
