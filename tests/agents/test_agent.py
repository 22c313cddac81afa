from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launch.programs import alive
from trireme.agents.agent import NodeFacts, TaskAgent
from trireme.launch.config.task_config import GroupMember, TaskConfig
from trireme.launch.launcher import TaskEnded

pytestmark = pytest.mark.processes

SECONDS = 60.0
ALONE = TaskConfig(job="j")
FOREVER = "import signal\nprint('up', flush=True)\nwhile True:\n    signal.pause()\n"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[TaskAgent]:
    agent = TaskAgent("worker:0", ("program.py", "--x"), str(tmp_path))
    yield agent
    agent.shut_down()


def start(
    agent: TaskAgent,
    directory: Path,
    program: str,
    task: TaskConfig = ALONE,
    attempt: int = 1,
    **environ: str,
) -> tuple[int, str]:
    (directory / "program.py").write_text(program)
    return agent.start(task, environ, "127.0.0.1", attempt)


def hear(agent: TaskAgent, until: str = "") -> tuple[list[tuple[str, bool]], TaskEnded | None]:
    """Listens until a line was said, or the task has ended."""
    lines: list[tuple[str, bool]] = []
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        report = agent.report(1.0)
        lines += [(line.decode(), error) for line, error in report.lines]
        if report.ended or (until and (until, False) in lines):
            return lines, report.ended
    raise AssertionError(f"no end after {SECONDS:.0f} s: {lines}")


def test_it_passes_on_what_the_task_says_and_how_it_ends(agent: TaskAgent, tmp_path: Path) -> None:
    program = "import os, sys\nprint(sys.argv[1], os.environ['A'])\nsys.exit('alas')\n"
    start(agent, tmp_path, program, A="b")
    lines, end = hear(agent)
    assert sorted(lines) == [("--x b", False), ("alas", True)]
    assert end is not None
    assert (end.status, end.reason.kind) == (1, "exit")
    assert time.time() - SECONDS < end.reason.at <= time.time()


def test_it_starts_the_task_again(agent: TaskAgent, tmp_path: Path) -> None:
    for said in ("one", "two"):
        start(agent, tmp_path, f"print({said!r})\n")
        lines, end = hear(agent)
        assert lines == [(said, False)]
        assert end is not None
        assert end.status == 0


def test_a_task_that_is_told_to_end_ends(agent: TaskAgent, tmp_path: Path) -> None:
    start(agent, tmp_path, FOREVER)
    hear(agent, "up")
    agent.send_signal(signal.SIGTERM, 1)
    _, end = hear(agent)
    assert end is not None
    assert end.status == -signal.SIGTERM


def test_who_is_dismissed_leaves_nothing_behind(agent: TaskAgent, tmp_path: Path) -> None:
    child = "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'input()'], " + (
        "stdin=subprocess.PIPE)\nprint(p.pid, flush=True)\n"
    )
    pid, _ = start(agent, tmp_path, child + FOREVER)
    lines, _ = hear(agent, "up")
    grandchild = int(lines[0][0])
    agent.shut_down()
    assert not alive(pid)
    psutil.wait_procs([psutil.Process(grandchild)] if psutil.pid_exists(grandchild) else [], 10)
    assert not alive(grandchild)


def test_an_end_may_be_ordered_before_the_start_and_not_for_the_next(
    agent: TaskAgent, tmp_path: Path
) -> None:
    agent.send_signal(signal.SIGKILL, 1)
    start(agent, tmp_path, FOREVER)
    _, end = hear(agent)
    assert end is not None
    assert end.status == -signal.SIGKILL
    start(agent, tmp_path, "print('again')\n", attempt=2)
    lines, end = hear(agent)
    assert lines == [("again", False)]
    agent.shut_down()
    start(agent, tmp_path, FOREVER, attempt=3)
    _, end = hear(agent)
    assert end is not None
    assert end.status == -signal.SIGKILL


def test_the_first_of_a_process_group_has_the_socket_at_which_they_meet(
    agent: TaskAgent, tmp_path: Path
) -> None:
    program = (
        "import os, socket\nfrom trireme.launch.environment import detect\n"
        "task = detect()\nfd = task.descriptors['process_group']\n"
        "here = socket.socket(fileno=fd).getsockname()\n"
        "print(task.group.address, '%s:%s' % here)\n"
    )
    first = TaskConfig(job="j", workers=2, group=GroupMember(size=2))
    _, meeting = start(agent, tmp_path, program, task=first)
    assert meeting.startswith("127.0.0.1:")
    lines, _ = hear(agent)
    assert lines == [(f"{meeting} {meeting}", False)]


def inspect(directory: Path, script: str) -> NodeFacts:
    return TaskAgent("worker:0", (script,), str(directory)).inspect("n", "10.0.0.1")


def test_it_says_what_is_wrong_with_its_node(tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text("")
    fine = inspect(tmp_path, "there.py")
    assert (fine.problem, fine.node, fine.address) == ("", "n", "10.0.0.1")
    missing = inspect(tmp_path, "gone.py").problem
    assert missing == f"{tmp_path / 'gone.py'} cannot be read"
    nowhere = inspect(tmp_path / "no", "gone.py").problem
    assert nowhere == f"there is no directory {tmp_path / 'no'}"
