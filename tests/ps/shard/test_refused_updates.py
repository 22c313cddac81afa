"""An update that cannot be applied is refused by every copy alike, and ends no server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.ps.bench import ASYNC, SYNC, Bench, told
from tests.ps.replication.test_following import FIRST, Link, follow, take, to
from tests.ps.test_optimizers import CASES
from trireme.errors import OutOfMemory
from trireme.ps.extra import Extra, ShownExtension
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import (
    Applied,
    Attach,
    Duplicate,
    GroupSpec,
    OptimizerSpec,
    Push,
    PushReply,
    RejectedVerdict,
    Verdict,
)
from trireme.ps.replication.log import Tell
from trireme.ps.replication.messages import ConnectToShard
from trireme.ps.replication.replicas import Replicas
from trireme.ps.rule import Rule
from trireme.ps.shard.values.segment_optimizer import SegmentOptimizer
from trireme.ps.snapshot_messages import Load, TensorSpec
from trireme.tables import row_index, row_optimizers
from trireme.tables.job.requests import RowUpdates, encoded
from trireme.tables.table_spec import FTRL, SGD, Adagrad, Add, RowWiseAdagrad, SparseAdam, TableSpec
from trireme.wire.handshake import Identity
from trireme.wire.message import Message

POISON = 666.0
ROW_OPTIMIZERS = [SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), SparseAdam(), FTRL(0.1), Add()]


def shown(spec: TableSpec) -> ShownExtension:
    return ShownExtension("tables", (msgspec.json.encode(spec).decode(),))


def copies(rule: Rule = ASYNC, extension: ShownExtension | None = None, **made: Any) -> list[Bench]:
    """Two copies of a shard, which are given the same events."""
    both = [Bench(rule, loaded=False, **made) for _ in range(2)]
    for each in both:
        each.attach(0, extension=extension)
        each.load(0)
    return both


def verdicts(copies: list[Bench], event: Callable[[Bench], Any]) -> list[Verdict]:
    """Gives an event to all copies; returns their verdicts, which are the same."""
    first, second = (
        [m.verdict for _, m in told(event(each)) if isinstance(m, PushReply)] for each in copies
    )
    assert first == second
    return first


def contents(bench: Bench) -> list[tuple[Any, bytes]]:
    """All that a copy holds, bit for bit."""
    state = bench.shard.state
    assert state.values is not None
    tensors = state.values.copy(state=True)
    if state.extension is not None:
        tensors += state.extension.copy()
    held = [(spec, tensor.numpy().tobytes()) for spec, tensor in tensors]
    return [*held, (state.step, repr(state.table.records).encode())]


def is_refused(verdict: Verdict, why: str) -> bool:
    return isinstance(verdict, RejectedVerdict) and why in verdict.reason


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers raise after they have applied a gradient of `POISON`."""
    step, apply = SegmentOptimizer.step, row_optimizers.apply

    def dense(self: Any, gradients: Any, *rest: Any) -> None:
        poison = gradients.vectors[0][0].item() >= POISON
        step(self, gradients, *rest)
        if poison:
            raise ValueError("half of it is applied")

    def rows(optimizer: Any, addresses: Any, updates: Any, at: int) -> None:
        apply(optimizer, addresses, updates, at)
        if (updates == POISON).any():
            raise ValueError("half of it is applied")

    monkeypatch.setattr(SegmentOptimizer, "step", dense)
    monkeypatch.setattr(row_optimizers, "apply", rows)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", CASES)
def test_an_exception_of_an_optimizer_refuses_the_push_at_all_copies(name: str) -> None:
    kind, hyper = CASES[name]
    both = copies(optimizer=OptimizerSpec(kind, (GroupSpec(hyper),)))
    assert verdicts(both, lambda each: each.push(0)) == [Applied(1)]
    (verdict,) = verdicts(both, lambda each: each.push(0, 2, POISON))
    assert is_refused(verdict, "step 2 could not be applied to shard 0: ValueError: half of it")
    assert verdicts(both, lambda each: each.push(0, 2, POISON)) == [Duplicate(verdict)]
    assert verdicts(both, lambda each: each.push(1)) == [Applied(3)]
    assert contents(both[0]) == contents(both[1])
    assert both[0].counters["rejected"] == 1


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS, ids=lambda it: type(it).__name__)
def test_an_exception_of_a_row_optimizer_refuses_the_push_at_all_copies(optimizer: Any) -> None:
    both = copies(extension=shown(TableSpec("t", 1, optimizer)))

    def rows(value: float) -> Extra:
        return encoded([RowUpdates(0, np.arange(3), np.full((3, 1), value, np.float32))])

    assert verdicts(both, lambda each: each.push(0, extra=rows(1.0))) == [Applied(1)]
    (verdict,) = verdicts(both, lambda each: each.push(0, 2, extra=rows(POISON)))
    assert is_refused(verdict, "half of it is applied")
    assert verdicts(both, lambda each: each.push(1, extra=rows(1.0))) == [Applied(3)]
    assert contents(both[0]) == contents(both[1])


@pytest.mark.usefixtures("poisoned")
def test_a_round_that_cannot_be_applied_is_refused_to_all_of_its_workers() -> None:
    both = copies(SYNC)
    assert verdicts(both, lambda each: each.push(0, value=POISON)) == []
    refused = verdicts(both, lambda each: each.push(1, value=POISON))
    assert len(refused) == 2 and is_refused(refused[0], "half of it") and refused[0] == refused[1]
    verdicts(both, lambda each: each.push(0, 2))
    assert verdicts(both, lambda each: each.push(1, 2)) == [Applied(2), Applied(2)]
    assert contents(both[0]) == contents(both[1])


@pytest.mark.parametrize("rule", [ASYNC, SYNC])
def test_hyper_parameters_with_which_nothing_can_be_computed_are_taken_back(rule: Rule) -> None:
    """Each number is sensible by itself, and 0.96 to the power of -1e9 is no float."""
    group = {"lr": 0.1, "momentum_decay": 0.004}
    both = copies(rule, workers=(0,), optimizer=OptimizerSpec("NAdam", (GroupSpec(group),)))
    assert verdicts(both, lambda each: each.push(0)) == [Applied(1)]
    poison = (GroupSpec({"lr": 0.1, "momentum_decay": -1e9}),)
    (verdict,) = verdicts(both, lambda each: each.push(0, 2, hyper=poison))
    assert is_refused(verdict, "OverflowError")
    assert verdicts(both, lambda each: each.push(0, 3)) == [Applied(3)]
    assert contents(both[0]) == contents(both[1])


def test_examples_of_a_refused_push_are_dealt_again(poisoned: None) -> None:
    bench = Bench()
    spans = bench.lease(0)
    bench.push(0, value=POISON, examples=spans)
    assert bench.lease(1) == spans


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OutOfMemory("no"), RuntimeError("DefaultCPUAllocator: not enough memory")],
    ids=repr,
)
def test_a_lack_of_memory_is_the_copys_own_and_no_verdict(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*said: Any) -> None:
        raise error

    bench = Bench()
    monkeypatch.setattr(SegmentOptimizer, "step", lacks)
    with pytest.raises(type(error)):
        bench.push(0)
    with pytest.raises(RuntimeError, match="allocate"):
        torch.empty(1 << 60)


# What can be known before, and replicas that are being filled -------------------------------------


TABLE = TableSpec("t", 1, Add(), "int64")


class Primary:
    """A primary with a table, whose backup follows it, and a worker that asks it."""

    def __init__(self) -> None:
        self.server, self.backup = Replicas[Link](0), Replicas[Link](1)
        for each in (self.server, self.backup):
            each.incarnation = 1
            take(each, FIRST)
        assert follow(self.server, self.backup, to(1)) is not None
        self._link = Link(Identity("job", "worker:0", 1))
        replica = self.server.addressed(self._link, ConnectToShard(0, 1))
        assert replica is not None
        self.replica, bench = replica, Bench(loaded=False)
        self.ask(Attach(1, bench.layout.spec, bench.optimizer, bench.rule, shown(TABLE)))
        spec = TensorSpec("values", "float32", "float32", 0, 16)
        self.ask(Load(1, 0, (spec,), (), ()), [(spec, torch.zeros(16))])
        self._gradients = PartBuffer(bench.layout, 0)

    def ask(self, message: Message, what: Any = None) -> list[Any]:
        """The worker asks; returns the primary's outputs, among them entries for the backup."""
        self.replica.dispatcher.admit(self._link, message)
        out = list(self.replica.request(0.0, self._link, object(), message, what))
        return [*out, *[each for _, kept in self._log._held for each in kept]]

    def push(self, sequence: int, keys: int) -> list[Any]:
        update = RowUpdates(0, np.arange(keys), np.ones((keys, 1), np.int64))
        push = Push(sequence, 1, 0, 0, 1.0, extra=encoded([update]))
        return self.ask(push, self._gradients)

    @property
    def _log(self) -> Any:
        return self.replica.log


def test_rows_for_which_a_slot_has_no_room_are_refused_before_they_are_an_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_index, "MOST_RECORDS", 20)
    primary = Primary()
    before = primary.replica.position
    out = primary.push(1, 20 * 256)
    (reply,) = (each for each in out if isinstance(getattr(each, "message", None), PushReply))
    assert is_refused(reply.message.verdict, "a slot has at most 20")
    assert not any(isinstance(each, Tell) for each in out)
    assert primary.replica.position == before
    primary.push(1, 5)
    assert primary.replica.position == before + 1


def test_a_replica_without_all_rows_begins_again_where_rows_could_not_be_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have applied them: the row that raised may be one that it lacks."""

    def fails(*said: Any) -> None:
        raise ValueError("poison")

    primary = Primary()
    log = primary.replica.log
    assert log is not None
    log._followers[1].lacks = 7
    monkeypatch.setattr(row_optimizers, "apply", fails)
    primary.push(1, 5)
    assert log.useless == {(1, 1)}
