"""Changes the values of one shard by pushes that are decided, each once, with its verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trireme.errors import OutOfMemory
from trireme.ps.extra import Extra
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import Applied, GroupSpec, Push, RejectedVerdict, Stale
from trireme.ps.shard.answers import Answers, PushAnswer
from trireme.ps.shard.push_table import Decided, Pending
from trireme.ps.shard.rounds import Mean
from trireme.ps.shard.state import ModelDescription, ShardState
from trireme.ps.shard.values.gradient_sums import Total

_Change = tuple[Total | None, Extra]
"""An update of the values, None for none, and updates of extra values."""


class Updates:
    """Applies decided pushes, or calls them stale."""

    def __init__(self, state: ShardState, answers: Answers) -> None:
        self._state = state
        self.answers = answers
        self._scratch: PartBuffer | None = None
        self.mean = Mean(self._spare)  # the mean gradient of pushes
        # Of the first push for the open round that says so: its worker, and its digest of values
        # that the program has written.
        self._written: tuple[int, int] | None = None

    def begin(self, shown: ModelDescription) -> None:
        self.mean = Mean(self._spare, self._state.extension)

    def load(self) -> None:
        """Begins the first round, as values are loaded."""
        self._written = None

    # -- pushes that are held --------------------------------------------------------------------

    def note(self, pending: Pending) -> None:
        """Notes what a push for the open round says of values that the program has written."""
        if self._state.synchronous and self._written is None and _compares(pending.push):
            self._written = pending.owner.worker, pending.push.written

    def unlike(self, push: Push) -> str | None:
        """Returns why a push does not go with those of its round; None where it does.

        Their workers must have written the same values. The first push of an incarnation may be
        from values to which others have written already.
        """
        if self._written is None or not _compares(push) or push.pulled != self._state.step:
            return None
        worker, written = self._written
        if written == push.written:
            return None
        return (
            f"this worker and worker:{worker} have written different values since step "
            f"{push.pulled}, or one of them none: values that the program changes itself must be "
            "the same in every worker, as the round has one update for all"
        )

    # -- deciding --------------------------------------------------------------------------------

    def apply(self, pending: Pending, step: int) -> PushAnswer:
        """Applies a push by itself, which makes a global step; returns the answer."""
        state, push = self._state, pending.push
        staleness = state.step - push.pulled
        state.counters["staleness"] += staleness
        update = Total(pending.gradients, 1.0, push.absent) if push.weight > 0 else None
        extra = push.extra if push.weight > 0 else ()
        verdict = self._change(lambda: (update, extra), push.hyper, step)
        return self._decide(pending, verdict, staleness)

    def apply_round(
        self, members: Sequence[Pending], scale: float, step: int, late: Sequence[Pending]
    ) -> None:
        """Applies a round; updates that came too late for it are stale."""
        mean = self.mean
        hyper = self._agreed(members)
        verdict = self._change(
            lambda: (mean.update(members, scale), mean.extra(members, scale)), hyper, step
        )
        mean.forget()
        self._written = None
        self._state.counters["rounds"] += 1
        decided = [self._decide(pending, verdict, 0) for pending in members]
        self.answers.due += [each for each in decided if not each.pending.answered]
        self.drop_stale(late)

    def drop_stale(self, pushes: Sequence[Pending]) -> None:
        """Calls pushes stale, but for those of workers that are out of the job."""
        self.answers.due += map(self.stale, (each for each in pushes if not each.answered))

    def stale(self, pending: Pending) -> PushAnswer:
        step = self._state.step
        return self._decide(pending, Stale(step), step - pending.push.pulled)

    def _agreed(self, members: Sequence[Pending]) -> Sequence[GroupSpec] | None:
        """Returns the hyper-parameters of a round, where they have changed: its first worker's.

        A worker without examples says nothing of them. All others should state them alike: answers
        to the round carry a notice of workers that do not.
        """
        self.answers.notice = ""
        members = [each for each in members if each.push.weight]
        first = next((each for each in members if each.push.hyper is not None), None)
        if first is None:
            return None
        before = self._state.present
        for other in members:
            differs = _difference(first.push.hyper or before, other.push.hyper or before)
            if differs is not None:
                name, mine, theirs = differs
                self._state.counters["disagreements"] += 1
                self.answers.notice = (
                    f"the workers of a round disagree about {name}: it is {mine} at "
                    f"worker:{first.owner.worker} and {theirs} at worker:{other.owner.worker}, and "
                    "the first counts. Whoever changes it must do so alike in every worker: let a "
                    "session do it (scheduler=...), or go by global_step"
                )
                break
        return first.push.hyper

    def _change(
        self, make: Callable[[], _Change], hyper: Sequence[GroupSpec] | None, step: int
    ) -> Applied | RejectedVerdict:
        """Makes a step that changes the values; returns the verdict on its pushes.

        Every copy of the shard meets the same exception in the same place, so that refusing the
        pushes leaves all copies equal. The step counts all the same: other shards may have made
        it. A lack of memory is this process's own, and ends it.

        Args:
            hyper: the optimizer's hyper-parameters from now on, where they have changed.
        """
        state = self._state
        assert state.values is not None
        steps, state.step = step - state.step, step
        try:
            if hyper is not None:
                state.values.optimizer.set_hyper(hyper)
            update, extra = make()
            if state.extension is not None:
                state.extension.apply(extra, step)
            state.values.apply(update, None, step, steps)
        except Exception as error:
            if lacks_memory(error):
                raise
            state.counters["failed"] += 1
            if hyper is not None:
                state.values.optimizer.set_hyper(state.present)
            return RejectedVerdict(
                f"step {step} could not be applied to shard {state.number}: "
                f"{type(error).__name__}: {error}"
            )
        if hyper is not None:
            state.hyper = hyper
        return Applied(step)

    def _decide(self, pending: Pending, verdict: Decided, staleness: int) -> PushAnswer:
        state, owner, push = self._state, pending.owner, pending.push
        state.table.decide(owner, push.sequence, verdict)
        state.counters[_COUNTERS[type(verdict)]] += 1
        if (leader := state.leader) is not None:
            if state.participants.holds(owner):
                leader.ending.done(owner.worker)
            examples = leader.examples
            settle = examples.finish if isinstance(verdict, Applied) else examples.give_back
            settle(owner.worker, push.examples)
        return PushAnswer(pending, verdict, staleness)

    def _spare(self) -> PartBuffer:
        """Returns memory for the sum of a round, made when the first round needs it."""
        if self._scratch is None:
            assert self._state.layout is not None
            self._scratch = PartBuffer(self._state.layout, self._state.number)
        return self._scratch


_COUNTERS: dict[type[Decided], str] = {
    Applied: "applied",
    Stale: "stale",
    RejectedVerdict: "rejected",
}


def _compares(push: Push) -> bool:
    """Returns whether an update says what all workers of a round must have written."""
    return push.weight > 0 and push.sequence > 1


def _difference(
    groups: Sequence[GroupSpec], others: Sequence[GroupSpec]
) -> tuple[str, object, object] | None:
    """Returns the first hyper-parameter that differs, with both values; None for none."""
    for group, other in zip(groups, others, strict=True):
        for name, value in group.values.items():
            if value != other.values.get(name):
                return name, value, other.values.get(name)
    return None


def lacks_memory(error: Exception) -> bool:
    """Returns whether this process gets no memory."""
    allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return allocator or isinstance(error, MemoryError | OutOfMemory)
