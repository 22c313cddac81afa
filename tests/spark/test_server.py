"""Agents that call their launcher, in this process and without Spark."""

from __future__ import annotations

import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from trireme.agents.calls import AgentLostError
from trireme.launch.config.task_config import TaskConfig
from trireme.spark.agent import Station, run_agent
from trireme.spark.server import AgentServer

SECONDS = 60.0
pytestmark = pytest.mark.processes


@pytest.fixture
def server() -> Iterator[AgentServer]:
    with closing(AgentServer("127.0.0.1")) as made:
        yield made


class Executor:
    """Runs an agent in a thread, as a task of Spark does in a process."""

    def __init__(self, server: AgentServer, directory: Path, call: bytes | None = None):
        number, certificate, self.line = server.open("worker:0")
        where = ("127.0.0.1", server.port, certificate)
        self.station = Station("worker:0", number, *where, ("program.py",), str(directory), call)
        self.returned: list[bytes] = []

    def run(self) -> threading.Thread:
        thread = threading.Thread(target=lambda: self.returned.extend(run_agent(self.station)))
        thread.start()
        return thread


def test_what_was_asked_before_the_agent_called_is_answered_then(
    server: AgentServer, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text("print('up', flush=True)\nraise SystemExit(3)\n")
    executor = Executor(server, tmp_path)
    asked = executor.line.call("inspect_node")
    thread = executor.run()
    facts = asked.result(SECONDS)
    assert (facts.address, facts.problem) == ("127.0.0.1", "")
    call = executor.line.call
    call("start", TaskConfig(job="j"), {}, "127.0.0.1", 1).result(SECONDS)
    lines, ended = [], None
    while ended is None:
        report = call("report", 1.0).result(SECONDS)
        lines += [line for line, _ in report.lines]
        ended = report.ended
    assert (lines, ended.status) == ([b"up"], 3)
    executor.line.end()
    thread.join(SECONDS)
    assert not thread.is_alive() and executor.returned == [b""]
    with pytest.raises(AgentLostError, match="the launcher has ended it"):
        call("report", 1.0).result(SECONDS)


def test_an_agent_that_is_not_wanted_any_more_ends_and_its_second_try_too(
    server: AgentServer, tmp_path: Path
) -> None:
    executor = Executor(server, tmp_path)
    first = executor.run()
    executor.line.call("inspect_node").result(SECONDS)
    second = executor.run()  # by Spark, which believes that the first has failed
    second.join(SECONDS)
    assert not second.is_alive() and first.is_alive()
    executor.line.end()
    first.join(SECONDS)
    late = executor.run()
    late.join(SECONDS)
    assert not first.is_alive() and not late.is_alive()


def test_a_task_ends_with_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import signal\nwhile True:\n    signal.pause()\n")
    with closing(AgentServer("127.0.0.1")) as server:
        executor = Executor(server, tmp_path)
        thread = executor.run()
        start = executor.line.call("start", TaskConfig(job="j"), {}, "127.0.0.1", 1)
        pid, _ = start.result(SECONDS)
        executor.line.call("send_signal", signal.SIGINT, 0)  # of an attempt before: not sent
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not psutil.pid_exists(pid)


def test_a_stranger_reaches_no_agent(server: AgentServer, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    executor = Executor(server, tmp_path)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"inspect" not in plain.recv(100)
    with (
        socket.create_connection(("127.0.0.1", server.port), SECONDS) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
        context.wrap_socket(plain) as wrapped,
    ):
        wrapped.sendall(b"0\n")
        if not wrapped.recv(100):
            raise ConnectionResetError
    thread = executor.run()
    assert executor.line.call("inspect_node").result(SECONDS).problem == ""
    executor.line.end()
    thread.join(SECONDS)
