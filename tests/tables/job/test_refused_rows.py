"""An update of rows that cannot be applied is refused by every copy alike, and ends no server."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.ps.bench import Bench
from tests.ps.replication.test_following import FIRST, Link, follow, take, to
from tests.ps.shard.test_refused_updates import POISON, contents, copies, is_refused, verdicts
from trireme.ps.extra import Extra, ShownExtension
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import Applied, Attach, Push, PushReply
from trireme.ps.replication.log import Tell
from trireme.ps.replication.messages import ConnectToShard
from trireme.ps.replication.replicas import Replicas
from trireme.ps.snapshot_messages import Load, TensorSpec
from trireme.tables import row_index, row_optimizers
from trireme.tables.job.requests import RowUpdates, encoded
from trireme.tables.table_spec import FTRL, SGD, Adagrad, Add, RowWiseAdagrad, SparseAdam, TableSpec
from trireme.wire.handshake import Identity
from trireme.wire.message import Message

ROW_OPTIMIZERS = [SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), SparseAdam(), FTRL(0.1), Add()]


def shown(spec: TableSpec) -> ShownExtension:
    return ShownExtension("tables", (msgspec.json.encode(spec).decode(),))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers of rows raise after they have applied a gradient of `POISON`."""
    apply = row_optimizers.apply

    def rows(optimizer: Any, addresses: Any, updates: Any, at: int) -> None:
        apply(optimizer, addresses, updates, at)
        if (updates == POISON).any():
            raise ValueError("half of it is applied")

    monkeypatch.setattr(row_optimizers, "apply", rows)


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
    log._receivers[1].lacks = 7
    monkeypatch.setattr(row_optimizers, "apply", fails)
    primary.push(1, 5)
    assert log.useless == {(1, 1)}
