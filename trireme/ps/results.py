"""The result of a push, and the error of a push too many."""

from __future__ import annotations

import msgspec

from trireme.errors import ConfigurationError
from trireme.ps.messages import Applied, Duplicate, Verdict


class PushResult(msgspec.Struct, frozen=True):
    """The result of a push."""

    verdict: Verdict  # shard 0's; all servers decide alike
    step: int  # the global step of the values that came back
    staleness: int  # how many global steps lie between this worker's pull and its push
    stop: bool  # whether this worker should stop training
    steps: int = 1  # the number of the worker's steps that the push was of
    notice: str = ""  # a notice for the worker's program; empty as a rule

    @property
    def decided(self) -> Verdict:
        """The verdict; of a push that was repeated, the first one's."""
        return decided(self.verdict)

    @property
    def applied(self) -> bool:
        """Whether the update is in the values."""
        return isinstance(self.decided, Applied)


def decided(verdict: Verdict) -> Verdict:
    """Returns a verdict; of a push that was repeated, the first one's."""
    return verdict.original if isinstance(verdict, Duplicate) else verdict


def after_the_end(worker: int, step: int) -> ConfigurationError:
    """Returns the error of a worker that trains on after it was told to stop at `step`."""
    return ConfigurationError(
        f"worker:{worker} made an update after training had ended at step {step}: leave the loop "
        "when should_stop() says so; the batches of session.loader end by themselves"
    )
