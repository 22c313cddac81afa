"""One shard under any sequence of events: what it holds is what it says, once each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.ps.bench import ASYNC, SYNC, Bench, snapshot_of, told
from trireme.ps.messages import Applied, Duplicate, FencedVerdict, PushReply, RejectedVerdict, Stale
from trireme.ps.rule import Rule
from trireme.ps.shard.instructions import Instruction, Reply
from trireme.ps.snapshot_messages import Snapshot

Id = tuple[int, int, int]
"""A push by worker, incarnation, sequence; also its route."""

workers = st.integers(0, 3)


@dataclass
class Worker:
    """What one process of a worker knows."""

    incarnation: int
    sequence: int = 0
    pulled: int = 0
    waiting: float | None = None  # the gradient of the push under way


class ShardMachine(RuleBasedStateMachine):
    """Workers push and repeat, come and go; copies are taken in between."""

    rule_of_the_job: Rule = ASYNC

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(self.rule_of_the_job, workers=(0, 1))
        self.living = {0: Worker(1), 1: Worker(1)}
        self.starts = {0: 1, 1: 1, 2: 0, 3: 0}
        self.gone: list[Id] = []
        self.verdicts: dict[Id, Applied | Stale] = {}
        self.value = 100.0
        self.steps = 0
        self.history = {0: 100.0}
        self.copies = 0

    # -- what happens -----------------------------------------------------------------------------

    @rule(worker=workers, share=st.integers(-9, 9))
    def push(self, worker: int, share: int) -> None:
        who = self.living.get(worker)
        if who is None or who.waiting is not None:
            return
        who.sequence += 1
        who.waiting = 12.0 * share
        self.send(worker)

    @rule(worker=workers)
    def repeat(self, worker: int) -> None:
        """The last push comes once more: its answer may have been lost."""
        who = self.living.get(worker)
        if who is not None and who.sequence > 0:
            self.send(worker)

    @precondition(lambda self: self.gone)
    @rule(choice=st.integers(0, 99))
    def come_back_from_the_dead(self, choice: int) -> None:
        worker, incarnation, sequence = self.gone[choice % len(self.gone)]
        out = self.bench.push(worker, sequence, 999.0, incarnation=incarnation, pulled=0)
        ((_, answer),) = told(out)
        assert isinstance(answer, PushReply)
        assert isinstance(answer.verdict, FencedVerdict)

    @rule(worker=workers)
    def start_anew(self, worker: int) -> None:
        """A process comes, in the place of one that may still live."""
        self.bury(worker)
        self.starts[worker] += 1
        self.living[worker] = Worker(self.starts[worker], pulled=self.bench.shard.state.step)
        self.change_view()

    @rule(worker=workers)
    def lose(self, worker: int) -> None:
        if worker in self.living and len(self.living) > 1:
            self.bury(worker)
            self.change_view()

    @rule()
    def copy(self) -> None:
        self.copies += 1
        out = self.bench.snapshot(self.copies)
        assert any(isinstance(message, Snapshot) for _, message in told(out))
        self.take(out)

    # -- how it is done ---------------------------------------------------------------------------

    def send(self, worker: int) -> None:
        who = self.living[worker]
        known = who.sequence - 1 if who.waiting is not None else who.sequence
        out = self.bench.push(
            worker,
            who.sequence,
            who.waiting if who.waiting is not None else 999.0,
            incarnation=who.incarnation,
            pulled=who.pulled,
            acknowledged=min(known, who.sequence - 1),
            route=(worker, who.incarnation, who.sequence),
        )
        self.take(out)

    def bury(self, worker: int) -> None:
        who = self.living.pop(worker, None)
        if who is not None:
            self.gone.append((worker, who.incarnation, who.sequence + 1))

    def change_view(self) -> None:
        before = {(worker, who.incarnation) for worker, who in self.living.items()}
        pairs = sorted(before)
        self.take(self.bench.view(*pairs))

    def take(self, out: Sequence[Instruction]) -> None:
        """Accounts for an event: which updates it applied, and what it said about them."""
        applied: dict[int, list[float]] = {}
        for route, message in told(out):
            if isinstance(message, PushReply):
                assert isinstance(route, tuple)
                self.hear(route, message, applied)
        self.explain(applied)
        self.check_values(out)
        if any(isinstance(message, Snapshot) for _, message in told(out)):
            snapshot, (number,) = snapshot_of(out)
            assert number == self.history[snapshot.step]

    def hear(self, who: Id, message: PushReply, applied: dict[int, list[float]]) -> None:
        verdict = message.verdict
        assert not isinstance(verdict, RejectedVerdict), verdict
        if isinstance(verdict, FencedVerdict):
            worker = self.living.get(who[0])
            assert worker is None or worker.incarnation != who[1], "fenced off in its own view"
            return
        worker = self.living[who[0]]
        assert (worker.incarnation, worker.sequence) == who[1:]
        if isinstance(verdict, Duplicate):
            assert self.verdicts[who] == verdict.original
        else:
            assert who not in self.verdicts, "a second verdict"
            assert isinstance(verdict, (Applied, Stale))
            self.verdicts[who] = verdict
            assert worker.waiting is not None
            if isinstance(verdict, Applied):
                assert worker.pulled == verdict.step - 1 or not self.rule_of_the_job.synchronous
                applied.setdefault(verdict.step, []).append(worker.waiting)
            worker.waiting = None
        worker.pulled = message.step
        assert message.step == self.bench.shard.state.step or not self.rule_of_the_job.synchronous

    def explain(self, applied: dict[int, list[float]]) -> None:
        """The values have changed by exactly what was told to be applied."""
        for step in sorted(applied):
            self.steps += 1
            assert step == self.steps
            members = applied[step]
            self.value -= sum(members) / len(members)
            self.history[step] = self.value

    def check_values(self, out: Sequence[Instruction]) -> None:
        """What an answer carries is of the step that it names."""
        for instruction in out:
            if isinstance(instruction, Reply) and isinstance(instruction.message, PushReply):
                for tensor in instruction.payload:
                    assert tensor[0] == self.value
                    if self.rule_of_the_job.synchronous:
                        assert tensor[0] == self.history[instruction.message.step]

    # -- what must always hold --------------------------------------------------------------------

    @invariant()
    def the_values_are_those_of_the_updates_told_of(self) -> None:
        assert self.bench.shard.state.step == self.steps
        assert self.bench.value == self.value

    @invariant()
    def the_table_counts_every_verdict(self) -> None:
        for row in self.bench.table:
            mine = [v for (worker, _, _), v in self.verdicts.items() if worker == row.worker]
            assert row.applied == sum(isinstance(v, Applied) for v in mine)
            assert row.stale == sum(isinstance(v, Stale) for v in mine)

    def teardown(self) -> None:
        """Nobody waits for ever: when all push, all are answered."""
        for _ in range(2):
            for worker, who in self.living.items():
                if who.waiting is None:
                    who.sequence += 1
                    who.waiting = 12.0
                self.send(worker)
            needed = self.rule_of_the_job.aggregate or len(self.living)
            waiting = sum(who.waiting is not None for who in self.living.values())
            assert waiting < max(1, needed) or waiting < len(self.living)


class SynchronousMachine(ShardMachine):
    rule_of_the_job = SYNC


class BackupMachine(ShardMachine):
    rule_of_the_job = Rule(aggregate=2, staleness=0)


TestAsynchronous = ShardMachine.TestCase
TestSynchronous = SynchronousMachine.TestCase
TestBackup = BackupMachine.TestCase
for case in (TestAsynchronous, TestSynchronous, TestBackup):
    case.settings = settings(stateful_step_count=30, deadline=None)
