"""Which worker saves the last step of a job."""

from __future__ import annotations

from trireme.cluster.view import View


class LastChief:
    """Decides for one worker, after its last update, whether it saves the job's last step.

    The worker that is chief then saves it. If that worker is lost before it has, the live worker
    with the lowest index takes over, until it has saved or a worker with a lower index is back.
    Nobody takes over from a chief that has saved. A worker that came back when the others had ended
    may have made further steps: these are saved once more.

    Args:
        worker: the index of this worker.

    Attributes:
        saves: whether this worker saves the last step; None until its last update.
    """

    def __init__(self, worker: int) -> None:
        self.saves: bool | None = None
        self._worker = worker

    def settle(self, is_chief: bool) -> None:
        """Settles whether this worker saves, before a chief may save and leave."""
        if self.saves is None:
            self.saves = is_chief

    def reopen(self) -> None:
        """Lets the chief be another worker again, as training goes on."""
        self.saves = None

    def awaits(self, view: View | None, step: int) -> bool:
        """Returns whether another worker is to save the last step, and has not yet.

        Args:
            view: the newest view; None where there is no coordinator.
            step: the last step, as far as this worker knows.
        """
        return self.saves is False and view is not None and not view.has_saved(step)

    def follow(self, view: View | None, step: int) -> bool:
        """Takes over from a chief that is lost; hands over to one that came back.

        Args:
            view: the newest view; None where there is no coordinator.
            step: the last step, as far as this worker knows.

        Returns:
            Whether this worker saves now and did not before, or the other way round.
        """
        before = self.saves
        if before is None or view is None or view.has_saved(step):
            return False
        self.saves = view.chief == self._worker
        return self.saves != before
