"""The agent of a step and what speaks with it, over pipes in place of `srun`'s."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launch.programs import alive
from trireme.agents.agent import TaskReport
from trireme.agents.calls import AgentLostError
from trireme.launch.config.task_config import TaskConfig
from trireme.slurm.pool import SrunAgent

pytestmark = pytest.mark.processes

SECONDS = 60.0
FOREVER = "import signal\nprint('up', flush=True)\nwhile True:\n    signal.pause()\n"


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SrunAgent]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9")
    module = ("-m", "trireme.slurm.step")
    agent = SrunAgent([sys.executable, *module, "worker:0", "10.0.0.3", "program.py", "--x"])
    yield agent
    agent.end()


def start(agent: SrunAgent, directory: Path, program: str) -> int:
    (directory / "program.py").write_text(program)
    call = agent.call("start", TaskConfig(job="j"), {"A": "b"}, "127.0.0.1", 1)
    pid, _ = call.result(SECONDS)
    return int(pid)


def hear(agent: SrunAgent, until: str = "") -> tuple[list[str], TaskReport]:
    """Listens until a line was said, or the task has ended."""
    lines: list[str] = []
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        report: TaskReport = agent.call("report", 1.0).result(SECONDS)
        lines += [line.decode() for line, _ in report.lines]
        if report.ended or (until and until in lines):
            return lines, report
    raise AssertionError(f"no end after {SECONDS:.0f} s: {lines}")


def test_it_says_where_it_is_and_where_it_was_started(agent: SrunAgent, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    facts = agent.call("inspect_node").result(SECONDS)
    assert (facts.node, facts.address, facts.problem) == ("n3", "10.0.0.3", "")
    assert agent.call("launcher_address").result(SECONDS) == "10.0.0.9"


def test_it_runs_a_task_and_passes_on_what_that_says(agent: SrunAgent, tmp_path: Path) -> None:
    program = "import os, sys\nprint(sys.argv[1], os.environ['A'], '\\x80\\x00')\nsys.exit(3)\n"
    start(agent, tmp_path, program)
    lines, report = hear(agent)
    assert lines == ["--x b \x80\x00"]
    assert report.ended is not None
    assert (report.ended.name, report.ended.status) == ("worker:0", 3)


def test_a_call_that_waits_for_news_holds_up_no_other(agent: SrunAgent, tmp_path: Path) -> None:
    start(agent, tmp_path, FOREVER)
    hear(agent, "up")
    waiting = agent.call("report", SECONDS)
    agent.call("send_signal", signal.SIGKILL, 1).result(SECONDS)
    report = waiting.result(SECONDS)
    assert report.ended.status == -signal.SIGKILL


def test_a_signal_to_the_step_is_for_its_task(agent: SrunAgent, tmp_path: Path) -> None:
    start(agent, tmp_path, FOREVER)
    hear(agent, "up")
    agent._process.send_signal(signal.SIGTERM)
    _, report = hear(agent)
    assert report.ended is not None
    assert report.ended.status == -signal.SIGTERM
    assert agent.call("inspect_node").result(SECONDS).node == "n3"


def test_what_an_agent_cannot_do_is_no_loss(agent: SrunAgent) -> None:
    with pytest.raises(RuntimeError) as caught:
        agent.call("nothing").result(SECONDS)
    assert not agent.is_loss(caught.value)


def test_a_step_that_ends_is_a_loss_and_takes_its_task_along(
    agent: SrunAgent, tmp_path: Path
) -> None:
    pid = start(agent, tmp_path, FOREVER)
    hear(agent, "up")
    waiting = agent.call("report", SECONDS)
    agent._process.kill()
    for call in (waiting, agent.call("inspect_node")):
        with pytest.raises(AgentLostError) as caught:
            call.result(SECONDS)
        assert agent.is_loss(caught.value)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], 10)
    assert not alive(pid)


def test_an_agent_that_is_ended_ends_its_task(agent: SrunAgent, tmp_path: Path) -> None:
    pid = start(agent, tmp_path, FOREVER)
    hear(agent, "up")
    agent._process.stdin.close()  # type: ignore[union-attr]
    agent._process.wait(SECONDS)
    assert not alive(pid)


def test_why_a_step_was_lost_is_what_srun_said(tmp_path: Path) -> None:
    program = "import sys; sys.exit('srun: error: Node failure on n3')"
    agent = SrunAgent([sys.executable, "-c", program])
    with pytest.raises(AgentLostError, match="Node failure on n3"):
        agent.call("inspect_node").result(SECONDS)
