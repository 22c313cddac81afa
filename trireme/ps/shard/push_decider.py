"""Decides pushes: by themselves, once every server has them, or in synchronous rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trireme.errors import OutOfMemory
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import Applied, FromServer, GroupSpec, Push, RejectedVerdict, Stale
from trireme.ps.row_messages import RowUpdates
from trireme.ps.rule import Rule
from trireme.ps.server_messages import PushesCommitted, PushesStaged, RoundClose, RoundReady
from trireme.ps.shard.answers import Answers, PushAnswer
from trireme.ps.shard.commit import CommitFollower, CommitLeader
from trireme.ps.shard.instructions import Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Decided, Pending, WorkerRecord
from trireme.ps.shard.rounds import (
    Decision,
    Round,
    RoundFollower,
    RoundHyperparameters,
    RoundLeader,
    compares,
)
from trireme.ps.shard.state import ShardState, ShownModel
from trireme.ps.shard.values.gradient_sums import Total

_Change = tuple[Total | None, Sequence[RowUpdates] | None]
"""An update of the values, and updates of rows; None where there are none."""


class PushDecider:
    """Decides the pushes of one shard, each once, and changes the values with its verdict.

    Args:
        state: the shard's.
        answers: takes the answers to decided pushes.

    Attributes:
        due: whether a push is decided that other servers must hear of before it is applied here.
    """

    def __init__(self, state: ShardState, answers: Answers) -> None:
        self.due = False
        self._state = state
        self._answers = answers
        self._hyper = RoundHyperparameters()
        self._scratch: PartBuffer | None = None
        self._round = Round(0, self._spare)
        self._coordinator: RoundLeader | RoundFollower = RoundLeader(Rule(), 1)
        # Of asynchronous pushes, where servers are several.
        self._commits: CommitLeader | CommitFollower | None = None

    # -- events ----------------------------------------------------------------------------------

    def begin(self, shown: ShownModel) -> None:
        """Chooses how pushes are decided, as the first worker has shown its model."""
        rule, servers, index = shown.rule, shown.layout.spec.shards, self._state.server
        self._hyper = RoundHyperparameters(shown.optimizer.groups)
        self._coordinator = RoundFollower(rule) if index else RoundLeader(rule, servers)
        if not rule.synchronous and servers > 1:
            self._commits = CommitFollower() if index else CommitLeader(servers)

    def load(self) -> None:
        """Begins the first round, as values are loaded."""
        self._round = self._new_round()

    @property
    def waits_for_nobody(self) -> bool:
        """Whether a push that comes now is decided at once."""
        state = self._state
        return not state.synchronous and self._commits is None and state.barrier.token is None

    def awaits(self, who: Participant) -> bool:
        """Returns whether a round has updates of others, and waits for one of a participant."""
        return bool(self._round.pending) and who not in self._round.pending

    def decide_one(self, pending: Pending, *, applied: bool) -> PushAnswer:
        """Decides a push by itself: applies it, or calls it stale; returns the answer."""
        if not applied:
            return self._decide_stale(pending)
        state, push = self._state, pending.push
        staleness = state.step - push.pulled
        state.counters["staleness"] += staleness
        update = Total(pending.gradients, 1.0, push.absent) if push.weight > 0 else None
        rows = push.rows if push.rows and push.weight > 0 else None
        verdict = self._change(lambda: (update, rows), push.hyper, push.steps)
        return self._decide(pending, verdict, staleness)

    def consider(self, pending: Pending) -> None:
        """Decides a push, stages it, adds it to its round, or holds it back for a cut."""
        state, worker = self._state, pending.owner.worker
        if state.table.records[worker].pending is not pending:
            return  # it was held back, and its worker is out by now
        over = state.ending.reached(state.step)
        if self._commits is not None:
            self._commits.add(pending)
        elif state.barrier.holds(pending):
            state.barrier.later.append(pending)
        elif not state.synchronous:
            self._answers.withheld[worker] = self.decide_one(pending, applied=not over)
        elif over or pending.push.pulled < state.step:
            self._answers.due.append(self._decide_stale(pending))
        else:
            self._round.add(pending)

    def unlike(self, push: Push) -> str | None:
        """Returns why a push does not go with those of its round; None where it does.

        Their workers must have written the same values. The first push of an incarnation may be
        from values to which others have written already.
        """
        first = self._round.written
        if first is None or not compares(push) or push.pulled != self._round.step:
            return None
        worker, written = first
        if written == push.written:
            return None
        return (
            f"this worker and worker:{worker} have written different values since step "
            f"{push.pulled}, or one of them none: values that the program changes itself must be "
            "the same in every worker, as the round has one update for all"
        )

    def drop(self, record: WorkerRecord) -> None:
        """Drops the push of a worker that is out, unless another server counts on it."""
        pending, number = record.pending, self._state.participants.view.number
        if pending is not None:
            if self._round.pending.get(pending.owner) is pending:
                self._coordinator.drop(self._round, pending.owner)
            if self._commits is not None:
                self._commits.drop(pending, number)
            record.pending = None

    def replay(self) -> None:
        """Considers again the pushes that a cut has held back."""
        barrier = self._state.barrier
        held, barrier.later = barrier.later, []
        for pending in held:
            self.consider(pending)

    def hear(self, server: int, message: FromServer) -> Sequence[Send]:
        """Takes a message of another server; returns messages to others.

        At shard 0 it is which updates or asynchronous pushes another server holds; at the others
        what shard 0 has proposed or decided. A message that is not for this server, or not of this
        rule, changes nothing.
        """
        state, coordinator, commits = self._state, self._coordinator, self._commits
        if isinstance(message, RoundReady) and isinstance(coordinator, RoundLeader):
            return coordinator.hear(state.step, server, message)
        if isinstance(message, RoundClose) and isinstance(coordinator, RoundFollower):
            # Shard 0 counts only on what this one has said that it holds.
            held = self._round.pending.keys()
            if message.step != state.step or all(pair in held for pair in message.members):
                coordinator.hear(state.step, message)
        elif isinstance(message, PushesStaged) and isinstance(commits, CommitLeader):
            commits.hear(server, message)
        elif isinstance(message, PushesCommitted) and isinstance(commits, CommitFollower):
            commits.hear(message)
        return ()

    def proceed(self) -> Sequence[Send]:
        """Decides all that can be decided now; returns messages to other servers."""
        if self._state.synchronous:
            return self._close_round()
        return () if self._commits is None else self._commit(self._commits)

    # -- what is waited for ----------------------------------------------------------------------

    def waiting(self) -> Iterator[tuple[Pending, str, tuple[str, ...]]]:
        """Yields the pushes that are not decided, each with the reason and the tasks waited for."""
        reason = f"round {self._round.step + 1}"
        participants = self._state.participants
        view = participants.view
        missing = self._coordinator.missing(self._round, participants.live, view)
        for pending in self._round.pending.values():
            yield pending, reason, missing
        if self._commits is not None:
            for pending in self._commits.staged:
                yield pending, "a push to reach every server", self._commits.missing(pending, view)

    # -- deciding --------------------------------------------------------------------------------

    def _change(
        self, make: Callable[[], _Change], hyper: Sequence[GroupSpec] | None, steps: int
    ) -> Applied | RejectedVerdict:
        """Makes steps that change the values and rows; returns the verdict on their pushes.

        Every copy of the shard meets the same exception in the same place, so that refusing the
        pushes leaves all copies equal. The steps count all the same: other shards may have made
        them. A lack of memory is this process's own, and ends it.

        Args:
            make: returns the changes.
            hyper: the optimizer's hyper-parameters from now on, where they have changed.
            steps: how many steps.

        Raises:
            OutOfMemory: this process has no memory for the change.
            MemoryError, RuntimeError: the same, as Python and torch say it.
        """
        state = self._state
        assert state.values is not None and state.shown is not None
        before = state.hyper if state.hyper is not None else state.shown.optimizer.groups
        state.step += steps
        try:
            if hyper is not None:
                state.values.optimizer.set_hyper(hyper)
            update, rows = make()
            if rows is not None and state.tables is not None:
                state.tables.apply(rows, state.step)
            state.values.apply(update, None, state.step, steps)
        except Exception as error:
            if lacks_memory(error):
                raise
            state.counters["failed"] += 1
            if hyper is not None:
                state.values.optimizer.set_hyper(before)
            return RejectedVerdict(
                f"step {state.step} could not be applied to shard {state.server}: "
                f"{type(error).__name__}: {error}"
            )
        if hyper is not None:
            state.hyper = hyper
        return Applied(state.step)

    def _decide(self, pending: Pending, verdict: Decided, staleness: int) -> PushAnswer:
        """Records the verdict on a push; returns the answer."""
        state, owner, push = self._state, pending.owner, pending.push
        state.table.decide(owner, push.sequence, verdict)
        if state.participants.holds(owner):
            state.ending.done(owner.worker)
        if isinstance(verdict, Applied):
            state.counters["applied"] += 1
            state.examples.finish(owner.worker, push.examples)
        else:
            state.counters["stale" if isinstance(verdict, Stale) else "rejected"] += 1
            state.examples.give_back(owner.worker, push.examples)
        return PushAnswer(pending, verdict, staleness)

    def _decide_stale(self, pending: Pending) -> PushAnswer:
        step = self._state.step
        return self._decide(pending, Stale(step), step - pending.push.pulled)

    def _commit(self, commits: CommitLeader | CommitFollower) -> Sequence[Send]:
        """Carries out the decisions about staged pushes, and makes the next one."""
        state = self._state
        while (found := commits.decided) is not None:
            pending, applied = found
            if state.barrier.stops_commit(pending, state.step):
                break
            commits.done()
            answer = self.decide_one(pending, applied=applied)
            if not pending.answered:
                self._answers.withheld[pending.owner.worker] = answer
        if isinstance(commits, CommitLeader):
            ready = commits.ready
            self.due = ready is not None and not state.barrier.stops_commit(ready, state.step)
            if self.due:  # the others are told first, and apply it when this server does
                commits.decide(applied=not state.ending.reached(state.step))
        return commits.tell(state.participants.view.number)

    def _close_round(self) -> Sequence[Send]:
        """Closes the open round, or takes it as far as it goes."""
        state = self._state
        if state.barrier.stops_round(state.step):
            return ()
        told, decision = self._coordinator.decide(self._round, state.participants.live)
        if decision is not None:
            self._apply_round(decision)
        return told

    def _apply_round(self, decision: Decision) -> None:
        """Applies the round; updates that came too late for it are stale."""
        state, current = self._state, self._round
        members = [current.pending[member] for member in decision.members]
        steps = max((pending.push.steps for pending in members), default=0)
        settled = self._hyper.settled
        hyper = self._hyper.of(members)
        verdict = self._change(
            lambda: (current.update(decision), current.rows(decision)), hyper, steps
        )
        if isinstance(verdict, RejectedVerdict):
            self._hyper.settled = settled
        for member in decision.members:
            del current.pending[member]
        self._answers.notice = self._hyper.notice
        state.counters["rounds"] += 1
        if self._hyper.disagreements:
            state.counters["disagreements"] = self._hyper.disagreements
        self._round = self._new_round()
        self._coordinator.begin()
        late = [pending for _, pending in sorted(current.pending.items()) if not pending.answered]
        decided = [self._decide(pending, verdict, 0) for pending in members]
        decided += map(self._decide_stale, late)
        self._answers.due += [each for each in decided if not each.pending.answered]

    def _new_round(self) -> Round:
        tables = self._state.tables
        return Round(self._state.step, self._spare, () if tables is None else tables.specs)

    def _spare(self) -> PartBuffer:
        """Returns memory for the sum of a round, made when the first round needs it."""
        if self._scratch is None:
            shown = self._state.shown
            assert shown is not None
            self._scratch = PartBuffer(shown.layout, self._state.server)
        return self._scratch


def lacks_memory(error: Exception) -> bool:
    """Returns whether an exception says that this process gets no memory."""
    allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return allocator or isinstance(error, MemoryError | OutOfMemory)
