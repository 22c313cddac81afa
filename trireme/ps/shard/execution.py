"""Holds what is to be decided at one shard, and carries out the leader's decisions in order.

`Updates` changes the values by pushes that are decided, each once, with its verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trireme.errors import OutOfMemory
from trireme.ps.extra import Extra
from trireme.ps.flat import PartBuffer
from trireme.ps.leader.decisions import (
    Add,
    Apply,
    Cut,
    Decided,
    Decision,
    Divide,
    Held,
    Members,
    PushId,
    Stop,
)
from trireme.ps.leader.leader import needed_for
from trireme.ps.messages import Applied, FromServer, GroupSpec, Push, RejectedVerdict, Stale
from trireme.ps.shard import push_table
from trireme.ps.shard.additions import Additions
from trireme.ps.shard.answers import Answers, PushAnswer, Wait, wait
from trireme.ps.shard.follower import Follower
from trireme.ps.shard.instructions import Instruction, Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.rounds import Mean
from trireme.ps.shard.snapshots import Snapshots
from trireme.ps.shard.state import ShardState
from trireme.ps.shard.values.gradient_sums import Total
from trireme.ps.shard.values.parameters import ValuesFactory

_Change = tuple[Total | None, Extra]  # of the values, None for none, and of extra values


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

    def begin(self) -> None:
        """Takes the model that was shown, also with parameters that were added."""
        self._scratch = None
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
        if written >> 32 != push.written >> 32:
            return (
                f"this worker steps optimizer {push.written >> 32}, and worker:{worker} "
                f"{written >> 32}: all of a round step the same, in as many batches (drop_last)"
            )
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
        state.watch.before_change(step - steps, state.values)
        try:
            if hyper is not None:
                state.values.optimizer.set_hyper(hyper)
            update, extra = make()
            if state.extension is not None:
                state.extension.apply(extra, step)
            state.values.changes += 1
            if update is not None:
                state.values.optimizer.step(update.gradients, update.divisor, update.absent)
                state.values.average(step, steps)
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
        state.watch.after_change(step, state.values)
        return Applied(step)

    def _decide(self, pending: Pending, verdict: push_table.Decided, staleness: int) -> PushAnswer:
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


_COUNTERS: dict[type[push_table.Decided], str] = {
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
    for group, other in zip(groups, others, strict=True):
        for name, value in group.values.items():
            if value != other.values.get(name):
                return name, value, other.values.get(name)
    return None


def lacks_memory(error: Exception) -> bool:
    """Returns whether this process gets no memory."""
    allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return allocator or isinstance(error, MemoryError | OutOfMemory)


class Execution:
    """One shard's part in the sequence of decisions."""

    def __init__(self, state: ShardState, factory: ValuesFactory) -> None:
        self.answers = Answers(state)
        self.updates = Updates(state, self.answers)
        self.follower = Follower()
        self.snapshots = Snapshots(state)
        self.additions = Additions(state, factory, self.follower.held)
        self.due = False  # whether `proceed` is to be called before the next event
        self._state = state
        self._stopped_in = 0  # the number of the view for which it has stopped last

    @property
    def stopped(self) -> bool:
        return 0 < self._stopped_in == self._state.participants.view.number

    # -- what is to be decided -------------------------------------------------------------------

    def take(self, pending: Pending) -> Sequence[Instruction]:
        """Takes a push: decides it at once where no other push or shard must be there for that."""
        state, push, leader = self._state, pending.push, self._state.leader
        if leader is not None and leader.alone and not state.synchronous and not self.stopped:
            if state.over:
                answer = self.updates.stale(pending)
            else:
                answer = self.updates.apply(pending, state.step + push.steps)
            return [*self.answers.give(answer), *self.proceed()]
        if state.over or (state.synchronous and push.pulled < state.step):
            self.answers.due.append(self.updates.stale(pending))
        else:
            self.follower.hold(pending)
            self.updates.note(pending)
            if leader is not None:
                leader.hold(pending.id, push.steps)
        return self.proceed()

    def drop(self, who: Participant) -> list[Pending]:
        """Drops a lost worker's pushes that the leader cannot apply; returns the unanswered."""
        unanswered, leader = list[Pending](), self._state.leader
        if (answer := self.answers.withheld.pop(who.worker, None)) is not None:
            unanswered.append(answer.pending)
        pending = self.follower.held.get(who)
        if pending is not None and not pending.answered:
            unanswered.append(pending)
            view = self._state.participants.view.number
            self.follower.drop(pending, view, leads=leader is not None)
            self.updates.mean.forget()  # it may lie in the worker's memory
            if leader is not None:
                leader.drop(pending.id)
        return unanswered

    def unanswered(self) -> Iterator[Pending]:
        yield from (answer.pending for answer in self.answers.withheld.values())
        yield from (pending for pending in self.follower.held.values() if not pending.answered)

    def awaits(self, who: Participant) -> bool:
        """Returns whether a round has updates of others, and waits for one of a participant."""
        held = self.follower.held
        return self._state.synchronous and bool(held) and who not in held

    def hear(self, shard: int, message: FromServer) -> None:
        """Takes what another shard holds, or the leader's decisions; of others it takes nothing."""
        leader = self._state.leader
        if isinstance(message, Held) and leader is not None:
            leader.hear(shard, message)
        elif isinstance(message, Decided) and leader is None:
            self.follower.hear(message)

    # -- decisions -------------------------------------------------------------------------------

    def proceed(self) -> list[Instruction]:
        """Carries out all decisions that have come, then makes the answers that can go out.

        The answers come last: the values that they carry are of the step that they name.
        """
        self.due, state, leader = False, self._state, self._state.leader
        out = self._follow()
        if leader is None:
            if (held := self._report()) is not None:
                out.append(Send(0, held))
            return [*out, *self.answers.proceed()]
        while not self.follower.decided:
            live, snapshots = state.participants.live, self.snapshots.tokens
            additions = self.additions.tokens
            decision = leader.decide(state.step, live, snapshots, self._square, additions)
            if decision is None:
                break
            self.follower.decided.append(decision)
            if not leader.alone:  # first the message to the others, and then `go_on`
                self.due = True
                break
            out += self._follow()
        if not leader.alone:
            messages = leader.tell(state.participants.view.number)
            out += [Send(shard, message) for shard, message in messages]
        return [*out, *self.answers.proceed()]

    def _follow(self) -> list[Instruction]:
        out, follower, view = list[Instruction](), self.follower, self._state.participants.view
        while follower.decided:
            decision = follower.decided[0]
            if isinstance(decision, Divide) and decision.view >= view.number:
                # Another view lets the shard go on; one that is behind has to take this one first.
                if decision.view == view.number:
                    self._stopped_in = view.number
                break
            follower.decided.popleft()
            out += self._carry_out(decision)
        return out

    def _carry_out(self, decision: Decision) -> Sequence[Instruction]:
        follower = self.follower
        if isinstance(decision, Apply):
            self._apply(decision)
        elif isinstance(decision, Cut):
            return self.snapshots.make(decision.worker, decision.token)
        elif isinstance(decision, Add):
            self.updates.begin()
            return self.additions.make(decision.worker, decision.token)
        elif isinstance(decision, Stop):
            self._state.over = True
            self.updates.drop_stale(follower.take_all())
        elif isinstance(decision, Members):
            self._state.table.count(decision.workers)
        elif not isinstance(decision, Divide):
            follower.propose(decision.pushes)
        return ()

    def _apply(self, decision: Apply) -> None:
        members = [self.follower.take(push) for push in decision.pushes]
        if self._state.synchronous:
            late = self.follower.take_all()
            self.updates.apply_round(members, decision.scale, decision.step, late)
            return
        for pending in members:
            answer = self.updates.apply(pending, decision.step)
            if not pending.answered:
                self.answers.withheld[pending.owner.worker] = answer

    def _report(self) -> Held | None:
        rule, live = self._state.rule, self._state.participants.live
        square = self._square if rule.clip_norm is not None else None
        snapshots = self.snapshots.tokens.items()
        needed, additions = needed_for(rule, live), self.additions.tokens
        return self.follower.report(needed, live, snapshots, square, additions)

    def _square(self, pushes: Sequence[PushId]) -> float:
        held = self.follower.held
        return self.updates.mean.square([held[Participant(*push[:2])] for push in pushes])

    # -- what is waited for ----------------------------------------------------------------------

    def waits(self, now: float) -> Iterator[Wait]:
        for pending in self.follower.held.values():
            if not pending.answered:
                yield wait(now, pending, *self._missing(pending))
        yield from self.snapshots.waits(now)
        yield from self.additions.waits(now)
        yield from self.answers.waits(now)

    def _missing(self, pending: Pending) -> tuple[str, tuple[str, ...]]:
        state, held = self._state, self.follower.held
        participants = state.participants
        reason, pushes = "a push to reach every server", [pending.id]
        if state.synchronous:
            reason = f"round {state.step + 1}"
            absent = [w for w, i in sorted(participants.live.items()) if (w, i) not in held]
            if absent:
                return reason, tuple(f"worker:{worker}" for worker in absent)
            pushes = [each.id for each in held.values()]
        if state.leader is None:
            return reason, (participants.view.primary_name(0),)
        return reason, state.leader.missing(pushes, participants.view)
