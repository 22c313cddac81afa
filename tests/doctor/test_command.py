"""`trireme doctor` as a user has it: the lines, JSON, and the exit status."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from trireme.cli import main
from trireme.cluster.messages import TaskState, TaskStatus
from trireme.doctor.command import listening


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checks_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict]]:
    status = main(["doctor", "--json", *words])
    return status, {check["topic"]: check for check in json.loads(capsys.readouterr().out)}


def test_this_host_can_run_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    """At least this test suite runs here; nothing but versions may be wrong."""
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[1] == "trireme"
    assert lines[-1].split(":")[0].endswith(" checks")
    for topic in ("loopback", "listening", "run directory"):
        assert any(line.startswith(f"ok       {topic} ") for line in lines), topic


def test_a_port_that_is_taken_names_its_holder(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        status, checks = checks_of(capsys, "--port", str(port))
    assert status == 1
    assert checks[f"port {port}"]["level"] == "problem"
    assert "is taken by process" in checks[f"port {port}"]["finding"]


def test_tasks_are_reached_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        here = f"127.0.0.1:{server.getsockname()[1]}"
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        status, checks = checks_of(capsys, nobody, here)
    assert status == 1
    assert checks[here]["level"] == "ok"
    assert checks[nobody]["finding"].startswith("nothing listens at ")


def test_tasks_that_have_left_are_not_expected_to_listen() -> None:
    def server(index: int, state: TaskState) -> TaskStatus:
        address = f"tcp://here:{index}"
        return TaskStatus("ps", index, state, "", 1, "here", 1, address, 0.0, {})

    tasks = [server(0, "live"), server(1, "left"), server(2, "lost")]
    assert list(listening(tasks)) == [("ps:0", "here:0"), ("ps:2", "here:2")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nonsense",), "write host:port"),
        (("--port", "x"), "--port is 'x'"),
        (("--port", "70000"), "--port is '70000'"),
    ],
    ids=str,
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err
