"""The bare parameter server: arrays and tables of programs that train no network."""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trireme
from tests.harness import Cluster, run_job
from trireme.errors import CheckpointError, ConfigurationError, ConnectionBroken
from trireme.ps.client.lanes import Transmit
from trireme.ps.client.server_links import ServerLinks
from trireme.ps.extra import Extra, Place
from trireme.ps.messages import PullExtra, Push
from trireme.session.checkpoint import list_checkpoints, step_of
from trireme.shm.lent_memory import LentMemory
from trireme.shm.memory import available
from trireme.tables.job.connection import Connection
from trireme.tables.table_spec import (
    FTRL,
    SGD,
    Adagrad,
    Constant,
    Optimizer,
    RowWiseAdagrad,
    SparseAdam,
)

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")

CLOCKS = 12
FAR = 10**15


def make(run_dir: Path | None = None, **options: Any) -> Connection:
    ps: Connection = trireme.ps.connect(run_dir, **options)
    ps.create("vector", 3000, dtype="float64")
    ps.create("matrix", (10, 4), dtype="int64")
    ps.create("trained", 5, optimizer=SGD(lr=0.5), initializer=Constant(1.0))
    ps.create_table("table", 2)
    return ps


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("dtype", ["int32", np.int32, np.dtype("int32"), torch.int32])
def test_dtypes_are_those_of_numpy_or_torch_or_their_names(dtype: Any) -> None:
    with trireme.ps.connect() as ps:
        ps.create("array", 3, dtype=dtype)
        ps.create_table("table", 3, dtype=dtype)
        assert ps.pull("array").dtype == ps.pull("table", [1]).dtype == np.int32


def train(ps: Connection) -> dict[str, Any]:
    for clock in range(CLOCKS):
        ps.push("vector", np.arange(3000))
        ps.push("matrix", [1, 3, 3], np.full((3, 4), clock))
        ps.push("table", [[-7], [FAR]], [[[1, 2]], [[3, 4]]])
        ps.push("trained", np.ones(5))
        assert ps.clock().decided
    return {"step": ps.step}


def values(ps: Connection) -> dict[str, Any]:
    return {
        "vector": ps.pull("vector"),
        "matrix": ps.pull("matrix"),
        "table": ps.pull("table", [[-7, 5], [FAR, 5]]),
        "trained": ps.pull("trained"),
    }


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(servers=0),
        Cluster(workers=3, servers=2),
        Cluster(workers=2, servers=3, strategy="sync"),
        Cluster(workers=2, servers=1, strategy="ssp", staleness=1),
        Cluster(workers=2, servers=2, compress="int8"),
    ],
    ids=str,
)
def test_each_update_counts_once(cluster: Cluster, tmp_path: Path) -> None:
    run_job(cluster, lambda _: make(tmp_path), train)  # type: ignore[arg-type, return-value]
    with make(tmp_path) as ps:  # in one process, from the checkpoint
        found = values(ps)
        total = CLOCKS * cluster.workers
        np.testing.assert_array_equal(found["vector"], total * np.arange(3000.0))
        touched = cluster.workers * sum(range(CLOCKS))
        expected = np.zeros((10, 4), np.int64)
        expected[1], expected[3] = touched, 2 * touched
        np.testing.assert_array_equal(found["matrix"], expected)
        zero = [0.0, 0.0]
        rows = [[[total, 2 * total], zero], [[3 * total, 4 * total], zero]]
        np.testing.assert_array_equal(found["table"], rows)
        steps = CLOCKS if cluster.strategy == "sync" else total
        np.testing.assert_allclose(found["trained"], 1 - 0.5 * steps)
        assert ps.step == steps
        snapshot = ps.snapshot()
        np.testing.assert_array_equal(snapshot["table"]["keys"], [-7, FAR])
        np.testing.assert_array_equal(snapshot["matrix"]["keys"], [1, 3])


def test_a_job_ends_at_its_last_step() -> None:
    def program(ps: Connection) -> int:
        while not ps.stopping:
            ps.push("vector", np.ones(3000))
            ps.clock()
        return ps.step

    ran = run_job(Cluster(workers=2), lambda _: make(max_steps=9), program)  # type: ignore[arg-type, return-value]
    assert ran.values == [9, 9]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda ps: ps.create("vector", 3), "one of that name already"),
        (lambda ps: ps.create("x", (1, 2, 3)), "the shape is"),
        (lambda ps: ps.create("x", 0), "the shape is"),
        (lambda ps: ps.create("x", 3, optimizer=RowWiseAdagrad(lr=0.1)), "a vector has no rows"),
        (lambda ps: ps.create("x", 3, dtype="int32", optimizer=Adagrad(lr=0.1)), "optimizer Add"),
        (lambda ps: ps.create("x", 3, dtype=3), "dtype is '3': it is one of float32, float64"),
        (lambda ps: ps.create("x", 3, dtype=object), "dtype is 'object': it is one of"),
        (lambda ps: ps.create("x", 3, dtype=None), "dtype is 'None': it is"),
        (lambda ps: ps.pull("other"), "no array or table 'other': there are 'vector', 'matrix'"),
        (lambda ps: ps.pull("table"), "say which keys"),
        (lambda ps: ps.pull("table", [0.5]), "keys are integers"),
        (lambda ps: ps.pull("table", [[1], [2, 3]]), "keys and updates are arrays of numbers"),
        (lambda ps: ps.pull("vector", [1]), "a vector: pull and push it whole"),
        (lambda ps: ps.pull("matrix", [10]), "has 10 rows"),
        (lambda ps: ps.push("vector", np.ones(2)), r"its shape is \(3000,\), and the update's"),
        (lambda ps: ps.push("table", np.ones(2)), "give keys and rows"),
        (lambda ps: ps.push("table", [1], [[1.0]]), r"need rows of shape \(1, 2\)"),
        (lambda ps: ps.push("matrix", [1], [[0.5] * 4]), "float64 does not fit into int64"),
        (lambda ps: (ps.clock(), ps.create("x", 1)), "before the first pull"),
        (lambda ps: ps.push("trained", [np.nan] * 5), "NaN or infinity in float32"),
        (lambda ps: ps.push("table", [1], [[1.0, 1e300]]), "NaN or infinity in float32"),
        (lambda ps: ps.pull("table", [0.5]), "keys are integers"),
        (lambda ps: ps.clock(weight=-1), "finite number of at least 0"),
        (lambda ps: ps.clock(weight=float("nan")), "finite number of at least 0"),
        (lambda ps: ps.clock(weight="1"), "finite number of at least 0"),
        (lambda ps: ps.push("matrix", [1], [[1 << 63] * 4]), "an integer that does not fit into"),
        (lambda ps: (ps.push("table", [1, 1], [[2e38] * 2] * 2), ps.clock()), "add up to infinity"),
        (lambda ps: (ps.push("matrix", [1], [[1] * 4]), ps.clock(weight=0)), "added to 'matrix'"),
        (lambda ps: make(ema=0.9), "connect has no option 'ema'"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says), make() as ps:
        call(ps)


def test_tensors_and_no_keys_are_taken() -> None:
    with make() as ps:
        ps.push("table", torch.tensor([5]), torch.ones(1, 2, requires_grad=True))
        ps.push("table", [], np.empty((0, 2)))
        ps.clock()
        assert ps.pull("table", torch.tensor([5])).tolist() == [[1.0, 1.0]]
        assert ps.pull("table", []).shape == (0, 2)
        assert {name: each["keys"].tolist() for name, each in ps.snapshot().items()} == {
            "vector": [],
            "matrix": [],
            "trained": [],
            "table": [5],
        }


def test_nothing_is_possible_without_arrays_or_after_the_end() -> None:
    with pytest.raises(ConfigurationError, match="create an array or a table first"):
        trireme.ps.connect().clock()
    with make() as ps:
        pass
    with pytest.raises(ConfigurationError, match="the connection was closed"):
        ps.pull("vector")


@pytest.mark.parametrize(
    ("name", "form", "says"),
    [
        ("other", {}, "has the sparse table 'words', and the program has 'other'"),
        ("words", {"width": 3}, "whose row is of 2 float32, and the program's is of 3 float32"),
        ("words", {"dtype": "float64"}, "whose row is of 2 float32, and the program's is of 2 fl"),
        ("words", {"optimizer": FTRL(alpha=0.1)}, "whose optimizer's state is of 0 float32, and"),
    ],
)
def test_a_table_is_not_passed_over_when_a_job_is_resumed(
    tmp_path: Path, name: str, form: dict[str, Any], says: str
) -> None:
    with trireme.ps.connect(tmp_path) as ps:
        ps.create_table("words", 2)
        ps.push("words", [5], [[1.0, 2.0]])
        ps.clock()
    with pytest.raises(CheckpointError, match=says), trireme.ps.connect(tmp_path) as ps:
        ps.create_table(name, **{"width": 2, **form})
        ps.clock()
    with trireme.ps.connect(tmp_path) as ps:
        ps.create_table("words", 2, optimizer=SGD(0.1))  # neither has a state
        ps.create_table("new", 1)
        assert ps.pull("words", [5]).tolist() == [[1.0, 2.0]]


def test_the_state_of_one_optimizer_is_not_taken_for_that_of_another(tmp_path: Path) -> None:
    def clock(optimizer: Optimizer) -> None:
        with trireme.ps.connect(tmp_path) as ps:
            ps.create_table("words", 2, optimizer=optimizer)
            ps.push("words", [5], [[1.0, 2.0]])
            ps.clock()

    clock(FTRL(alpha=0.1))
    with pytest.raises(CheckpointError, match="trained by FTRL, and the program"):
        clock(SparseAdam(0.1))
    clock(FTRL(alpha=0.2))


def test_a_signal_ends_the_job_at_a_clock_and_the_last_step_is_saved(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, make(tmp_path) as ps:
        ps.clock()
        signal.raise_signal(signal.SIGTERM)
        assert ps.interrupted
        while not ps.stopping:
            ps.clock()
        step = ps.step
    assert ended.value.code == 130
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [step]
    assert signal.getsignal(signal.SIGTERM) is before


def test_workers_that_create_others_are_told() -> None:
    def made(index: int) -> Connection:
        ps: Connection = trireme.ps.connect()
        ps.create("vector", 3 + index)
        return ps

    with pytest.raises(trireme.ModelMismatchError, match="the tables differ"):
        _ = run_job(Cluster(workers=2), made, train_vector).values  # type: ignore[arg-type]


def train_vector(ps: Any) -> None:
    ps.clock()


@pytest.mark.skipif(not available(), reason="needs Linux")
def test_rows_lie_in_lent_memory_and_come_again_over_another_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every seventh connection breaks when a request has gone over it: the rows are sent again."""
    seen, sent = Counter[str](), itertools.count(1)
    transmit, received = ServerLinks.transmit, LentMemory.received

    def breaking(links: ServerLinks, orders: Sequence[Transmit]) -> None:
        for order in orders:
            transmit(links, [order])
            with_rows = isinstance(order.message, Push | PullExtra) and links.lends_extra
            if with_rows and next(sent) % 7 == 0:
                seen["broken"] += 1
                links._broke(order.shard, ConnectionBroken("the test has cut it"))
                assert links.links[order.shard].lent is None, "its memory is given up"

    def reading(memory: LentMemory, extra: Extra) -> Extra:
        for each in extra:
            seen["lent" if isinstance(each, Place) else "sent"] += 1
        return received(memory, extra)

    monkeypatch.setattr(ServerLinks, "transmit", breaking)
    monkeypatch.setattr(LentMemory, "received", reading)
    keys, steps = np.arange(500), 40

    def made(_: int) -> Connection:
        ps: Connection = trireme.ps.connect(max_steps=2 * steps)
        ps.create_table("counts", 3, dtype="int64")
        return ps

    def program(ps: Connection) -> Any:
        before = np.zeros((keys.size, 3), np.int64)
        while not ps.stopping:
            ps.push("counts", keys, np.repeat(keys, 3).reshape(-1, 3))
            ps.clock()
            rows = ps.pull("counts", keys)
            assert (rows == rows[:, :1]).all() and (rows >= before).all()
            before = rows
        return before[:, 0]

    cluster = Cluster(workers=2, servers=2, scheme="shm")
    ran = run_job(cluster, made, program)  # type: ignore[arg-type]
    last = max(ran.values, key=lambda rows: int(rows[1]))
    np.testing.assert_array_equal(last, 2 * steps * keys)
    assert seen["broken"] > 10 and seen["lent"] > 200 and not seen["sent"], seen


@pytest.mark.parametrize("servers", ["", " ", ["localhost:2222"], 2222])
def test_servers_are_named_in_one_text(servers: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"connect\(servers=.*: name them in one text"):
        trireme.ps.connect(servers=servers)
