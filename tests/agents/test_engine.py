"""The engine of a Ray cluster, with agents that answer what the tests say. Needs no Ray."""

from __future__ import annotations

import io
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trireme.agents.engine as module
from trireme.agents.agent import NodeFacts, TaskReport
from trireme.agents.engine import AgentEngine, _Task
from trireme.job_config import JobConfig
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.launcher import Job, TaskEnded, TaskLocated
from trireme.launch.output import Console, TaskOutputs
from trireme.ray.options import RayOptions

HERE = NodeFacts(node="n1", address="10.0.0.1", host="kernel/1", hostname="h1", version="1.0")
THERE = NodeFacts(node="n2", address="10.0.0.2", host="kernel/2", hostname="h2", version="1.0")
CONFIG = JobConfig().replaced("a test", join_timeout=40.0)
COMMON = TaskConfig(job="j", workers=1, servers=1, config=CONFIG)
SERVER = TaskConfig(job="j", role="ps", index=1, workers=1, servers=1, config=CONFIG)


class LossError(Exception):
    """An agent is gone."""


class FakeAgent:
    """An agent whose calls stay open until the test answers them."""

    def __init__(self) -> None:
        self.open: dict[str, Future[Any]] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.ended = False

    def call(self, method: str, *arguments: object) -> Future[Any]:
        self.asked.append((method, *arguments))
        self.open[method] = Future()
        return self.open[method]

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, LossError)

    def end(self) -> None:
        self.ended = True


class FakePool:
    """A pool in which there is room for all; `agents` are those that were started, by task."""

    place = "the cluster"
    options = RayOptions()

    def __init__(self) -> None:
        self.agents: dict[str, list[FakeAgent]] = {}
        self.released: list[str] = []

    def start_agents(self, names: list[str]) -> dict[str, FakeAgent]:
        for name in names:
            self.agents.setdefault(name, []).append(FakeAgent())
        return {name: self.agents[name][-1] for name in names}

    def release(self, name: str) -> None:
        self.released.append(name)

    def shortage(self, names: list[str]) -> str:
        return f"{len(names)} core on one node; the cluster has none"


class Cluster:
    """An engine that has a worker of a job, and may start a server; the time is `now`."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        patch.setattr(module, "time", clock)
        self.err = io.StringIO()
        self.reserved = FakePool()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        console = Console(io.StringIO(), self.err, {})
        self.outputs = TaskOutputs(lambda name: directory / name.replace(":", "-"), console)
        first: Any = FakeAgent()
        home = _Task("worker:0", first, HERE, "10.0.0.1")
        reserved: Any = self.reserved
        self.engine = AgentEngine(
            Job(("program.py",), COMMON),
            self.outputs,
            reserved,
            HERE,
            "10.0.0.1",
            {home.name: home},
            self._reader,
            self._writer,
        )

    def answer(self, method: str, value: object, name: str = "ps:1") -> list[Any]:
        """Answers a call of a task's newest agent; returns the events that follow."""
        future = self.reserved.agents[name][-1].open.pop(method)
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)
        return self.engine.wait(0)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, monkeypatch)
    yield cluster
    cluster.close()


def run(cluster: Cluster, facts: NodeFacts = THERE) -> None:
    """Has the server started, and run on a node."""
    cluster.engine.start(SERVER)
    cluster.answer("inspect_node", facts)
    assert cluster.answer("start", (77, "")) == [TaskLocated()]
    assert cluster.engine.pids["ps:1"] == 77


def test_a_task_that_joins_has_the_name_of_its_node_as_its_host(cluster: Cluster) -> None:
    run(cluster)
    (start,) = [asked for asked in cluster.reserved.agents["ps:1"][0].asked if asked[0] == "start"]
    assert (start[1].host, start[3]) == ("h2/n2", "10.0.0.2")
    assert cluster.engine.host("ps:1") == "h2/n2"
    assert "n2" in cluster.engine.nodes["ps:1"]


def test_it_says_who_waits_for_room_and_no_more_once_there_is_some(cluster: Cluster) -> None:
    cluster.engine.start(SERVER)
    assert cluster.engine.wait(0) == []
    assert cluster.err.getvalue() == ""
    for _ in range(3):
        cluster.now += 6
        assert cluster.engine.wait(0) == []
    said = cluster.err.getvalue()
    assert said.count("room on the cluster: ps:1 asks for 1 core on one node; the") == 1
    cluster.answer("inspect_node", THERE)
    cluster.answer("start", (77, ""))
    cluster.now += 35
    assert cluster.engine.wait(0) == []
    assert cluster.err.getvalue() == said


def test_a_task_that_finds_no_room_in_time_is_lost_and_gives_back_its_resources(
    cluster: Cluster,
) -> None:
    cluster.engine.start(SERVER)
    cluster.now += 41
    (event,) = cluster.engine.wait(0)
    assert isinstance(event, TaskEnded)
    assert event.reason.summary == "never started: no node had room for it within 40 s " + (
        "(--join-timeout)"
    )
    assert event.reason.kind == "gone"
    assert cluster.reserved.released == ["ps:1"]


def test_a_task_that_found_room_at_the_last_moment_has_time_to_start(cluster: Cluster) -> None:
    cluster.engine.start(SERVER)
    cluster.now += 39
    cluster.answer("inspect_node", THERE)
    cluster.now += 39
    assert cluster.engine.wait(0) == []
    cluster.now += 2
    (event,) = cluster.engine.wait(0)
    assert event.reason.summary.endswith("10.0.0.2 (n2): it does not answer")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_task_that_waits_for_room_ends_at_once(cluster: Cluster, number: signal.Signals) -> None:
    cluster.engine.start(SERVER)
    cluster.engine.send_signal("ps:1", number)
    (event,) = cluster.engine.wait(0)
    assert (event.name, event.status) == ("ps:1", -number)
    assert cluster.reserved.agents["ps:1"][0].ended
    assert cluster.reserved.released == ["ps:1"]


def test_a_task_that_is_dismissed_while_it_waits_for_room_never_starts(cluster: Cluster) -> None:
    cluster.engine.start(SERVER)
    cluster.engine.dismiss(["ps:1"])
    (event,) = cluster.engine.wait(0)
    assert (event.name, event.reason.summary) == ("ps:1", "had not started yet")
    assert cluster.reserved.agents["ps:1"][0].ended
    cluster.engine.dismiss(["ps:1"])  # every report of the coordinator says it again
    assert cluster.engine.wait(0) == []


def test_a_dismissed_task_gives_back_its_resources_when_it_has_ended_and_may_return(
    cluster: Cluster,
) -> None:
    run(cluster)
    cluster.engine.dismiss(["ps:1"])
    assert cluster.reserved.released == []
    ended = TaskEnded("ps:1", 0, module.describe_status(0))
    cluster.answer("report", TaskReport((), ended, ended.reason.at))
    assert cluster.reserved.released == ["ps:1"]
    assert cluster.reserved.agents["ps:1"][0].ended
    cluster.engine.dismiss([])
    run(cluster, HERE)
    assert len(cluster.reserved.agents["ps:1"]) == 2


def test_a_task_that_is_kept_after_all_keeps_its_resources(cluster: Cluster) -> None:
    run(cluster)
    cluster.engine.dismiss(["ps:1"])
    cluster.engine.dismiss([])
    ended = TaskEnded("ps:1", -9, module.describe_status(-9))
    cluster.answer("report", TaskReport((), ended, ended.reason.at))
    assert cluster.reserved.released == []
    cluster.engine.start(SERVER)
    assert len(cluster.reserved.agents["ps:1"]) == 1


def test_a_task_that_is_lost_gets_another_agent_and_its_process_is_forgotten(
    cluster: Cluster,
) -> None:
    """Else the coordinator's word about the lost process would count for the one in its place."""
    run(cluster)
    (event,) = cluster.answer("report", LossError("the node died"))
    assert event.reason.summary == "lost with its agent on node 10.0.0.2 (n2): the node died"
    assert cluster.engine.pids["ps:1"] == 77  # the launcher tells the coordinator of its end
    assert cluster.reserved.released == ["ps:1"]
    cluster.engine.start(SERVER)
    assert "ps:1" not in cluster.engine.pids
    assert len(cluster.reserved.agents["ps:1"]) == 2


def test_the_end_of_the_job_does_not_wait_for_who_waits_for_room(cluster: Cluster) -> None:
    cluster.engine.start(SERVER)
    first = cluster.engine._tasks["worker:0"].agent
    assert isinstance(first, FakeAgent)
    asked = first.call

    def shut_down(method: str, *arguments: object) -> Future[Any]:
        future = asked(method, *arguments)
        future.set_result(None)
        return future

    first.call = shut_down  # type: ignore[method-assign]
    cluster.engine.close()
    assert ("shut_down",) in first.asked
    assert ("shut_down",) not in cluster.reserved.agents["ps:1"][0].asked
    assert cluster.reserved.agents["ps:1"][0].ended
