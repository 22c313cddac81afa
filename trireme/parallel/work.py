"""What the processes of a pipeline do, and when: for pictures of a schedule."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["Work", "bubble"]


class Work(msgspec.Struct, frozen=True):
    """What a process did for a while.

    Attributes:
        process: along the pipeline.
        stage: which stage.
        kind: `forward`, `backward`, or `weight` where the gradients of weights are computed apart.
        microbatch: of which micro-batch.
        start, stop: in seconds, by the clock that all processes of a host share.
    """

    process: int
    stage: int
    kind: str
    microbatch: int
    start: float
    stop: float


def bubble(work: Sequence[Work]) -> float:
    """Returns the share of the processes' time, from the first begin to the last end, without work.

    Raises:
        ValueError: there is no work.
    """
    if not work:
        raise ValueError("no work was noted down")
    span = max(one.stop for one in work) - min(one.start for one in work)
    processes = len({one.process for one in work})
    busy = sum(one.stop - one.start for one in work)
    return max(0.0, 1 - busy / (span * processes)) if span else 0.0
