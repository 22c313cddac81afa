"""A table against a model of it, under any operations, among them those of a change of servers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.tables.contents import contents
from tests.tables.model import ModelTable, slot_of
from tests.tables.numbers import keys_in_one_line
from trireme.tables import row_index, row_storage
from trireme.tables.keys import SLOTS, slots_of
from trireme.tables.table import Table
from trireme.tables.table_spec import (
    FTRL,
    SGD,
    Adagrad,
    Add,
    Constant,
    Normal,
    RowWiseAdagrad,
    SparseAdam,
    TableSpec,
    Uniform,
    Zeros,
)

COLLIDING = keys_in_one_line(5, 0x12345678, 30, tag=17)
KNOWN = (0, 1, -1, 2**63 - 1, -(2**63), *COLLIDING, *range(50, 100))
KEYS = st.lists(st.sampled_from(KNOWN), max_size=40)
SPECS = st.builds(
    TableSpec,
    name=st.just("t"),
    width=st.sampled_from([1, 3]),
    optimizer=st.sampled_from(
        [SGD(0.1), Adagrad(0.1, 1e-6, 0.5), RowWiseAdagrad(0.1), SparseAdam(), FTRL(0.1, 1, 0.2)]
    ),
    dtype=st.just("float64"),
    initializer=st.sampled_from([Zeros(), Uniform(-1.0, 1.0, 3), Normal(0.0, 0.1, 4)]),
    admit_after=st.sampled_from([1, 1, 2, 3]),
    drop_after=st.sampled_from([0, 1, 2, 4]),
) | st.builds(
    TableSpec,
    name=st.just("t"),
    width=st.just(2),
    optimizer=st.just(Add()),
    dtype=st.just("int64"),
    initializer=st.sampled_from([Zeros(), Constant(-5)]),
    admit_after=st.sampled_from([1, 3]),
    drop_after=st.sampled_from([0, 3]),
)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are small, and some keys collide."""
    monkeypatch.setattr(row_index, "randbits", lambda bits: 0)
    monkeypatch.setattr(row_storage, "_BLOCK_BYTES", 1 << 7)


class TableMachine(RuleBasedStateMachine):
    """Two servers, each with some of the slots, against one model; and one that has everything."""

    @initialize(spec=SPECS)
    def begin(self, spec: TableSpec) -> None:
        self.spec = spec
        self.model = ModelTable(spec)
        self.whole = Table(spec)
        self.servers = [Table(spec), Table(spec)]
        self.owners = np.arange(SLOTS) % 2
        self.step = 0
        self.saved: tuple[Table, int] = (Table(spec), 0)

    def owner(self, keys: list[int]) -> np.ndarray[Any, Any]:
        owners: np.ndarray[Any, Any] = self.owners[slots_of(np.array(keys, np.int64))]
        return owners

    @rule(keys=KEYS, seed=st.integers(0, 1000))
    def push(self, keys: list[int], seed: int) -> None:
        self.step += 1
        keys = list(dict.fromkeys(keys))
        shape = (len(keys), self.spec.width)
        updates = np.random.default_rng(seed).integers(-4, 5, shape).astype(self.spec.dtype)
        self.model.push(keys, updates, self.step)
        batch = np.array(keys, np.int64)
        self.whole.push(batch, updates, step=self.step)
        owner = self.owner(keys)
        for number, server in enumerate(self.servers):
            server.push(batch[owner == number], updates[owner == number], step=self.step)

    @rule(keys=KEYS)
    def pull(self, keys: list[int]) -> None:
        expected, pulled = self.model.pull(keys), self.whole.pull(np.array(keys, np.int64))
        assert pulled.dtype == self.spec.dtype
        np.testing.assert_allclose(pulled, expected, rtol=1e-12, atol=1e-12)

    @rule()
    def drop(self) -> None:
        self.step += 1
        expected = self.model.drop_unused(self.step)
        assert self.whole.drop_unused(self.step) == expected
        assert sum(server.drop_unused(self.step) for server in self.servers) == expected

    @rule(slots=st.sets(st.sampled_from([slot_of(key) for key in KNOWN])))
    def migrate(self, slots: set[int]) -> None:
        """Slots change their server."""
        for source, target in ((0, 1), (1, 0)):
            moved = [slot for slot in slots if self.owners[slot] == source]
            for block in self.servers[source].export(slots=moved):
                self.servers[target].load(block)
            self.servers[source].remove(moved)
            self.owners[[slot for slot in moved]] = 2 + target
        self.owners[self.owners >= 2] -= 2

    @invariant()
    def servers_hold_the_same_as_one_table(self) -> None:
        if not hasattr(self, "model"):
            return
        _, rows, waiting = contents(self.whole)
        together: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        for number, server in enumerate(self.servers):
            part = contents(server)
            assert all(self.owners[slot_of(key)] == number for key in (*part[1], *part[2]))
            together[0].update(part[1])
            together[1].update(part[2])
        assert together == (rows, waiting)

    @invariant()
    def it_is_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        _, rows, waiting = contents(self.whole)
        assert {key: row[2:] for key, row in rows.items()} == {
            key: (row.step, row.touches) for key, row in self.model.rows.items()
        }
        assert waiting == self.model.waiting
        statistics = self.whole.statistics
        assert (statistics.rows, statistics.waiting) == (len(rows), len(waiting))
        assert statistics.dropped == len(self.model.dropped)
        keys = list(self.model.rows)
        np.testing.assert_allclose(
            self.whole.pull(np.array(keys, np.int64)), self.model.pull(keys), rtol=1e-12, atol=1e-12
        )


TestTable = TableMachine.TestCase
TestTable.settings = settings(stateful_step_count=15)
