"""How a job ended: which tasks failed, which one first, and the exit status."""

from __future__ import annotations

from dataclasses import dataclass, field

from trireme.launch.exit_reason import ExitReason

__all__ = ["INTERRUPTED", "Failure", "Verdict"]

INTERRUPTED = 130
"""The exit status of a task, or of a job, that was stopped and has saved."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A task that ended badly, and why."""

    name: str
    reason: ExitReason

    def __str__(self) -> str:
        """Returns what happened, such as `worker:1 was killed by SIGKILL`."""
        verb = "was" if self.reason.sudden else "failed:"
        return f"{self.name} {verb} {self.reason.summary}"


@dataclass(slots=True)
class Verdict:
    """What is known so far of how a job ends.

    Attributes:
        failed: whether the job as a whole failed.
        interrupted: whether the job was stopped before its end.
        failures: the tasks that failed, by themselves or because another one did, in the order
            in which they ended.
        lost: the workers that were killed while the others went on.
        unsaved: the workers that were killed before they could save, after a request to stop.
    """

    failed: bool = False
    interrupted: bool = False
    failures: list[Failure] = field(default_factory=list)
    lost: list[Failure] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)

    @property
    def culprit(self) -> Failure | None:
        """The task that failed first. One that failed by itself comes before any other."""
        victims = [failure for failure in self.failures if failure.reason.kind == "victim"]
        own = [failure for failure in self.failures if failure.reason.kind != "victim"]
        for candidates in (own, self.lost, victims):
            if candidates:
                return min(candidates, key=lambda failure: failure.reason.at)
        return None

    @property
    def status(self) -> int:
        """The job's exit status: 0 finished, 1 failed, 2 bad usage, 130 stopped and saved."""
        culprit = self.culprit
        if self.failed:
            return 2 if culprit is not None and culprit.reason.kind == "usage" else 1
        if self.unsaved:
            return 1
        return INTERRUPTED if self.interrupted else 0
