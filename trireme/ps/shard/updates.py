"""Changes the values of one shard by pushes that are decided, each once, with its verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trireme.errors import OutOfMemory
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import Applied, GroupSpec, Push, RejectedVerdict, Stale
from trireme.ps.row_messages import RowUpdates
from trireme.ps.shard.answers import Answers, PushAnswer
from trireme.ps.shard.push_table import Decided, Pending
from trireme.ps.shard.rounds import Mean, RoundHyperparameters, compares
from trireme.ps.shard.state import ModelDescription, ShardState
from trireme.ps.shard.values.gradient_sums import Total

_Change = tuple[Total | None, Sequence[RowUpdates] | None]
"""An update of the values, and updates of rows; None where there are none."""


class Updates:
    """Applies decided pushes, or calls them stale."""

    def __init__(self, state: ShardState, answers: Answers) -> None:
        self._state = state
        self.answers = answers
        self._hyper = RoundHyperparameters()
        self._scratch: PartBuffer | None = None
        self._mean = Mean(self._spare)
        # Of the first push for the open round that says so: its worker, and its digest of values
        # that the program has written.
        self._written: tuple[int, int] | None = None

    def begin(self, shown: ModelDescription) -> None:
        """Takes the model, as the first worker has shown it."""
        self._hyper = RoundHyperparameters(shown.optimizer.groups)
        self._mean = Mean(self._spare, shown.tables)

    def load(self) -> None:
        """Begins the first round, as values are loaded."""
        self._written = None

    # -- pushes that are held --------------------------------------------------------------------

    def note(self, pending: Pending) -> None:
        """Notes what a push for the open round says of values that the program has written."""
        if self._state.synchronous and self._written is None and compares(pending.push):
            self._written = pending.owner.worker, pending.push.written

    def unlike(self, push: Push) -> str | None:
        """Returns why a push does not go with those of its round; None where it does.

        Their workers must have written the same values. The first push of an incarnation may be
        from values to which others have written already.
        """
        if self._written is None or not compares(push) or push.pulled != self._state.step:
            return None
        worker, written = self._written
        if written == push.written:
            return None
        return (
            f"this worker and worker:{worker} have written different values since step "
            f"{push.pulled}, or one of them none: values that the program changes itself must be "
            "the same in every worker, as the round has one update for all"
        )

    def square(self, members: Sequence[Pending]) -> float:
        """Returns the squared L2 norm of this shard's part of the mean gradient of pushes."""
        return self._mean.square(members)

    def forget_mean(self) -> None:
        """Forgets a mean that may lie in memory of a worker that is out of the job."""
        self._mean.forget()

    # -- deciding --------------------------------------------------------------------------------

    def apply(self, pending: Pending, step: int) -> PushAnswer:
        """Applies a push by itself, which makes a global step; returns the answer."""
        state, push = self._state, pending.push
        staleness = state.step - push.pulled
        state.counters["staleness"] += staleness
        update = Total(pending.gradients, 1.0, push.absent) if push.weight > 0 else None
        rows = push.rows if push.rows and push.weight > 0 else None
        return self._decide(
            pending, self._change(lambda: (update, rows), push.hyper, step), staleness
        )

    def apply_round(
        self, members: Sequence[Pending], scale: float, step: int, late: Sequence[Pending]
    ) -> None:
        """Applies a round; updates that came too late for it are stale."""
        state, mean = self._state, self._mean
        settled = self._hyper.settled
        hyper = self._hyper.of(members)
        verdict = self._change(
            lambda: (mean.update(members, scale), mean.rows(members, scale)), hyper, step
        )
        if isinstance(verdict, RejectedVerdict):
            self._hyper.settled = settled
        mean.forget()
        self._written = None
        self.answers.notice = self._hyper.notice
        state.counters["rounds"] += 1
        if self._hyper.disagreements:
            state.counters["disagreements"] = self._hyper.disagreements
        decided = [self._decide(pending, verdict, 0) for pending in members]
        self.answers.due += [each for each in decided if not each.pending.answered]
        self.drop_stale(late)

    def drop_stale(self, pushes: Sequence[Pending]) -> None:
        """Calls pushes stale, but for those of workers that are out of the job."""
        self.answers.due += map(self.stale, (each for each in pushes if not each.answered))

    def stale(self, pending: Pending) -> PushAnswer:
        """Calls a push stale; returns the answer."""
        step = self._state.step
        return self._decide(pending, Stale(step), step - pending.push.pulled)

    def _change(
        self, make: Callable[[], _Change], hyper: Sequence[GroupSpec] | None, step: int
    ) -> Applied | RejectedVerdict:
        """Makes a step that changes the values and rows; returns the verdict on its pushes.

        Every copy of the shard meets the same exception in the same place, so that refusing the
        pushes leaves all copies equal. The step counts all the same: other shards may have made
        it. A lack of memory is this process's own, and ends it.

        Args:
            hyper: the optimizer's hyper-parameters from now on, where they have changed.
        """
        state = self._state
        assert state.values is not None and state.shown is not None
        before = state.hyper if state.hyper is not None else state.shown.optimizer.groups
        steps, state.step = step - state.step, step
        try:
            if hyper is not None:
                state.values.optimizer.set_hyper(hyper)
            update, rows = make()
            if rows is not None and state.tables is not None:
                state.tables.apply(rows, step)
            state.values.apply(update, None, step, steps)
        except Exception as error:
            if lacks_memory(error):
                raise
            state.counters["failed"] += 1
            if hyper is not None:
                state.values.optimizer.set_hyper(before)
            return RejectedVerdict(
                f"step {step} could not be applied to shard {state.number}: "
                f"{type(error).__name__}: {error}"
            )
        if hyper is not None:
            state.hyper = hyper
        return Applied(step)

    def _decide(self, pending: Pending, verdict: Decided, staleness: int) -> PushAnswer:
        """Records the verdict on a push; returns the answer."""
        state, owner, push = self._state, pending.owner, pending.push
        applied = isinstance(verdict, Applied)
        state.table.decide(owner, push.sequence, verdict)
        if applied:
            state.counters["applied"] += 1
        else:
            state.counters["stale" if isinstance(verdict, Stale) else "rejected"] += 1
        if (leader := state.leader) is not None:
            if state.participants.holds(owner):
                leader.ending.done(owner.worker)
            settle = leader.examples.finish if applied else leader.examples.give_back
            settle(owner.worker, push.examples)
        return PushAnswer(pending, verdict, staleness)

    def _spare(self) -> PartBuffer:
        """Returns memory for the sum of a round, made when the first round needs it."""
        if self._scratch is None:
            shown = self._state.shown
            assert shown is not None
            self._scratch = PartBuffer(shown.layout, self._state.number)
        return self._scratch


def lacks_memory(error: Exception) -> bool:
    """Returns whether an exception says that this process gets no memory."""
    allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return allocator or isinstance(error, MemoryError | OutOfMemory)
