"""What a worker is told: by a pull, by a push, and by a server that is asked to trace."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from trireme.ps.messages import Duplicate, Verdict

__all__ = ["PullResult", "PushResult", "ServerClock", "decided"]


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull brought: the step of the values, and whether the job has reached its end."""

    step: int
    stop: bool


class PushResult(msgspec.Struct, frozen=True):
    """What became of a push.

    Attributes:
        verdict: server 0's; all servers decide alike.
        step: the global step of the values that came back.
        staleness: how many updates were applied between this worker's pull and its push.
        stop: whether this worker should stop training.
        steps: of how many of the worker's steps the push was.
        notice: what the worker's program should be told; empty as a rule.
    """

    verdict: Verdict
    step: int
    staleness: int
    stop: bool
    steps: int = 1
    notice: str = ""

    @property
    def decided(self) -> Verdict:
        """The verdict; of a push that was repeated, the first one's."""
        return decided(self.verdict)


@dataclass(frozen=True, slots=True)
class ServerClock:
    """What a server said when it was asked to trace.

    Attributes:
        now: the time there, in seconds on its monotonic clock.
        clock: which clock that is.
        asked, heard: between which two times here that was.
        notes: what it did when, as JSON, where that was asked for.
    """

    now: float
    clock: str
    asked: float
    heard: float
    notes: bytes


def decided(verdict: Verdict) -> Verdict:
    """Returns a verdict; of a push that was repeated, the first one's."""
    return verdict.original if isinstance(verdict, Duplicate) else verdict
