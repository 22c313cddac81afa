from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.harness import Cluster, run_job
from tests.tracing import check_nesting, read_trace, tasks_of
from trireme.errors import ConfigurationError, UsageError
from trireme.launch.config.sources import read_config
from trireme.session.session import Session
from trireme.tracking.profile import Profile
from trireme.tracking.server_trace import Note
from trireme.tracking.trace import (
    MESSAGE,
    STAGE,
    ServerPart,
    TraceSpan,
    WorkerPart,
    merge,
    pack,
    unpack,
)


def session_of(model: nn.Module, hook: Profile, steps: int) -> Session:
    return Session(
        model,
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_steps=steps,
        checkpoint=None,
        hooks=[hook],
    )


def train(session: Session) -> int:
    inputs = torch.linspace(-1, 1, 400).reshape(100, 4)
    made = 0
    for batch in session.loader(TensorDataset(inputs, inputs[:, :2].argmax(1)), 5):
        session.step(batch)
        made += 1
    return made


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "servers", "prefetch"),
    [("sync", 1, False), ("async", 2, False), ("async", 1, True)],
)
def test_workers_and_servers_are_on_one_timeline(
    tmp_path: Path, strategy: str, servers: int, prefetch: bool
) -> None:
    cluster = Cluster(workers=2, servers=servers, strategy=strategy, prefetch=prefetch)
    models = [nn.Linear(4, 2) for _ in range(2)]
    ran = run_job(
        cluster,
        lambda index: session_of(
            models[index], Profile("3:6", operators=False, directory=tmp_path), 300
        ),
        train,
    )
    assert min(ran.values) >= 6
    events = read_trace(tmp_path / "steps-3-6.json.gz")
    tasks = tasks_of(events)
    assert set(tasks) == {"worker:0", "worker:1", *(f"ps:{s}" for s in range(servers))}
    for worker in ("worker:0", "worker:1"):
        names = [e["name"] for e in events if e["pid"] == tasks[worker] and e["ph"] == "X"]
        assert names.count("push") == names.count("wait") == names.count("compute") == 3
        assert [name for name in names if name.startswith("step")] == ["step 3", "step 4", "step 5"]
    for server in range(servers):
        own = [e for e in events if e["pid"] == tasks[f"ps:{server}"] and e["ph"] == "X"]
        names = [event["name"] for event in own]
        assert min(names.count(f"Push worker:{worker}") for worker in (0, 1)) >= 3
        applied = [event["name"] for event in own if event["cat"] == "apply"]
        assert len(set(applied)) == len(applied) >= 3
        if strategy == "sync":  # both workers' pushes make the same step
            assert {f"apply step {step}" for step in (4, 5, 6)} <= set(applied)


def test_a_lone_process_traces_itself_and_what_it_computes(tmp_path: Path) -> None:
    with session_of(nn.Linear(4, 2), Profile("2:4", directory=tmp_path), 8) as session:
        assert train(session) == 8
    events = read_trace(tmp_path / "steps-2-4.json.gz")
    assert tasks_of(events) == {"worker:0": 1}
    phases = [event for event in events if event.get("cat") == "phase"]
    assert [e["name"] for e in phases].count("apply") == 2
    compute = [event for event in phases if event["name"] == "compute"]
    products = [event for event in events if event["name"] == "aten::addmm"]
    assert len(products) == 2
    for product, phase in zip(products, compute, strict=True):  # one clock, whoever measured
        assert phase["ts"] <= product["ts"]
        assert product["ts"] + product["dur"] <= phase["ts"] + phase["dur"]


def test_a_run_that_ends_within_the_steps_is_traced_as_far_as_it_came(tmp_path: Path) -> None:
    hook = Profile("2:100", operators=False, directory=tmp_path)
    with session_of(nn.Linear(4, 2), hook, 4) as session:
        train(session)
    events = read_trace(tmp_path / "steps-2-100.json.gz")
    assert sum(event.get("cat") == "step" for event in events) == 2


def test_nothing_is_traced_before_the_steps_and_after_them(tmp_path: Path) -> None:
    hook = Profile("2:3", operators=False, directory=tmp_path)
    watched = []
    with session_of(nn.Linear(4, 2), hook, 5) as session:
        inputs = torch.zeros(100, 4)
        data = TensorDataset(inputs, inputs[:, 0].long())
        for batch in session.loader(data, 5):
            session.step(batch)
            watched.append(session.recorder.observer is not None)
    assert watched == [False] * 5  # it was there within the third step alone
    assert (tmp_path / "steps-2-3.json.gz").exists()


@pytest.mark.parametrize("steps", ["", "5", "5:", "9:9", "9:3", "a:b", "-1:4"])
def test_what_is_no_range_of_steps_is_refused(steps: str) -> None:
    with pytest.raises(ConfigurationError, match=r"first:end, such as 10:15"):
        Profile(steps)


@pytest.mark.parametrize("steps", ["8", "8:8"])
def test_a_launch_refuses_what_is_no_range_of_steps(steps: str) -> None:
    with pytest.raises(UsageError, match=rf"profile is '{steps}' \(command line\): it must be"):
        read_config({"profile": steps}, {}, None)


def test_a_trace_needs_a_place() -> None:
    with (
        pytest.raises(ConfigurationError, match="a trace has no directory"),
        session_of(nn.Linear(4, 2), Profile("0:1"), 2),
    ):
        pass


def test_a_small_message_does_not_become_a_large_part(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = gzip.compress(bytes(1 << 24))
    monkeypatch.setattr("trireme.tracking.trace._MOST_BYTES", 1 << 16)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 65536 bytes"):
            unpack(bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_parts_of_two_clocks_become_one_timeline() -> None:
    worker = WorkerPart(
        task="worker:0",
        place=2,
        offset=1000.0,
        spans=(
            TraceSpan("step 3", "step", 5.0, 6.0),
            TraceSpan("push", "phase", 5.5, 5.6),
            TraceSpan("wait", "phase", 5.6, 5.9),
        ),
    )
    assert unpack(pack(worker)) == worker
    with pytest.raises(ValueError, match="not a part of a trace"):
        unpack(b"something else")
    with pytest.raises(ValueError, match="not a part of a trace"):
        unpack(pack(worker)[:-20])
    notes = (Note("Push", 1005.65, 1005.8, "worker:0"), Note("apply", 1005.7, 1005.75, step=7))
    events = merge([worker], [ServerPart(0, 0.0, notes)])["traceEvents"]
    check_nesting(events)
    found = {event["name"]: event["ts"] for event in events if event["ph"] == "X"}
    assert found["push"] == pytest.approx(500_000)
    assert found["Push worker:0"] == pytest.approx(650_000)
    assert found["apply step 7"] == pytest.approx(700_000)


def test_stages_have_a_row_and_messages_may_overlap() -> None:
    spans = (
        TraceSpan("step 3", "step", 0.0, 9.0),
        TraceSpan("forward 1, micro-batch 0", STAGE, 1.0, 2.0),
        TraceSpan("backward 1, micro-batch 0", STAGE, 2.0, 4.0),
        TraceSpan("aten::mm", "cpu_op", 1.0, 1.5, 77),
        TraceSpan("gloo:send", MESSAGE, 1.4, 3.0),
        TraceSpan("gloo:recv", MESSAGE, 1.6, 5.0),
        TraceSpan("gloo:all_reduce", MESSAGE, 3.0, 6.0),
    )
    events = merge([WorkerPart("worker:0", 1, 0.0, spans)])["traceEvents"]
    check_nesting(events)
    rows: dict[str, list[set[str]]] = {}
    for about in events:
        if about["name"] == "thread_name":
            held = {e["name"] for e in events if e["ph"] == "X" and e["tid"] == about["tid"]}
            rows.setdefault(about["args"]["name"], []).append(held)
    assert rows == {
        "phases": [{"step 3"}],
        "stages": [{"forward 1, micro-batch 0", "backward 1, micro-batch 0"}],
        "operators": [{"aten::mm"}],
    }
    messages = [(e["ph"], e["name"], e["id"]) for e in events if e.get("cat") == MESSAGE]
    names = ("gloo:send", "gloo:recv", "gloo:all_reduce")
    assert messages == [
        (kind, name, f"1/{place}") for place, name in enumerate(names, 4) for kind in ("b", "e")
    ]


def test_a_timeline_leaves_out_what_servers_noted_for_another_trace() -> None:
    worker = WorkerPart("worker:0", 2, 1000.0, (TraceSpan("step 3", "step", 50.0, 51.0),))
    moments = {10: 1048.0, 11: 1049.5, 12: 1050.5, 13: 1051.5, 14: 1053.0}
    notes = tuple(Note("apply", at, at + 0.1, step=step) for step, at in moments.items())
    events = merge([worker], [ServerPart(0, 0.0, notes), ServerPart(1, 5000.0, notes)])
    found = [e["name"] for e in events["traceEvents"] if e.get("cat") == "apply"]
    assert found == ["apply step 11", "apply step 12", "apply step 13"]
