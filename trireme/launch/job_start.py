"""Whether a job has begun, which needs all of its tasks, or can no longer begin."""

from __future__ import annotations

from trireme.launch.exit_reason import ExitReason
from trireme.launch.verdict import Failure

__all__ = ["ENDED_TOO_EARLY", "NO_WORKER_JOINED", "JobStart"]


class JobStart:
    """What is known of the begin of a job.

    Attributes:
        joined: whether a worker ever joined; None while that is not known.
        formed: whether all tasks have joined.
        absent: a worker that ended before the job had begun; None where there is none.
        deadline: until when the job may still turn out to have begun without that worker.
    """

    def __init__(self) -> None:
        self.joined: bool | None = None
        self.formed = False
        self.absent: Failure | None = None
        self.deadline: float | None = None

    def note_absence(self, failure: Failure, deadline: float) -> None:
        """Notes the first worker that has ended for good before the job had begun."""
        if not self.formed and self.absent is None:
            self.absent, self.deadline = failure, deadline

    def take_absence(self) -> Failure | None:
        """Returns the worker that was noted, and forgets it."""
        absent, self.absent, self.deadline = self.absent, None, None
        return absent


ENDED_TOO_EARLY = ExitReason(
    kind="usage",
    summary="its program ended before the job had begun: the others waited for it. Does it open a "
    "trireme.Session, or call trireme.distribute, on every worker?",
    at=0.0,
)
"""Why a worker failed whose program ended well before the job had begun."""

NO_WORKER_JOINED = ExitReason(
    kind="usage",
    summary="the program ended, and no worker had joined the job: nothing was trained. Does it "
    "open a trireme.Session, or call trireme.distribute?",
    at=0.0,
)
"""Why a job failed whose programs ended well and never joined it."""
