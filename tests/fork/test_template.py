"""Tasks that are forked, each of which does something that a forked process could get wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import PYTHONPATH
from trireme.fork.template import can_fork
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig
from trireme.launch.launcher import TaskEnded, TaskLocated
from trireme.launch.local import HostEngine
from trireme.launch.output import Console
from trireme.launch.process_setup.orphans import LAUNCH_VARIABLE

pytestmark = pytest.mark.skipif(not can_fork(), reason="this system spawns tasks")

SECONDS = 120.0

SCRIPT = """
import json, os, random, sys
index = json.loads(os.environ["TRIREME_TASK"])["index"]

def tells():
    import numpy, torch
    print(json.dumps({
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "argv": sys.argv,
        "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
        "environ": open("/proc/self/environ").read(), "cwd": os.getcwd(), "path": sys.path[0],
        "task": os.environ["TRIREME_TASK"], "blas": os.environ.get("OPENBLAS_NUM_THREADS"),
        "name": __name__, "file": __file__, "random": random.random(),
        "numpy": float(numpy.random.rand()), "torch": torch.initial_seed(),
        "loaded": "torch._dynamo" in sys.modules, "stdin": sys.stdin.read(),
        "threads": len(os.listdir("/proc/self/task")),
    }))

def ends_like_any_program():
    import atexit, tempfile, threading, helper
    global unclosed, temporary, cycle
    unclosed = open("unclosed", "w")
    unclosed.write("written")
    temporary = tempfile.NamedTemporaryFile(dir=".", prefix="temporary-")
    atexit.register(lambda: print("first registered", len(ended), flush=True))
    atexit.register(lambda: ended.append("last registered"))
    ended = []
    thread = threading.Thread(target=lambda: (event.wait(), print("thread ended")))
    event = threading.Event()
    thread.start()
    threading.Timer(0.05, event.set).start()
    os.write(1, b"no line end")

def fails():
    raise ValueError("wrong")

def exits():
    sys.exit(7)

def waits():
    print("waits", flush=True)
    sys.stdin = os.fdopen(os.pipe()[0])
    sys.stdin.read()

def computes():
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    data = TensorDataset(torch.arange(8.0))
    total = sum(float(x.sum()) for x, in DataLoader(data, batch_size=2, num_workers=1))
    torch.set_num_threads(2)
    a = torch.ones(256, 256)
    print(total, float((a @ a).sum()))

(tells, tells, ends_like_any_program, fails, exits, waits, computes)[index]()
"""
TELLS, ENDS, FAILS, EXITS, WAITS, COMPUTES = (0, 1), 2, 3, 4, 5, 6


@dataclass
class Ran:
    """What came of the tasks, by their names."""

    directory: Path
    script: Path
    launch: str = ""
    lines: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=dict)
    ended: dict[str, TaskEnded] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    said: str = ""
    survived: bool = False

    def show(self, name: str, line: bytes, error: bool) -> None:
        (self.errors if error else self.lines).setdefault(name, []).append(line.decode())

    def told(self, index: int) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.lines[f"worker:{index}"][0])
        return answer


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """Runs all tasks; the template is killed while one of them waits."""
    directory = tmp_path_factory.mktemp("here")
    script = directory / "programs" / "program.py"
    script.parent.mkdir()
    script.write_text(SCRIPT.replace("import json, os", "import torch, json, os"))
    (script.parent / "helper.py").write_text("kept = open('helpers', 'w')\nkept.write('too')\n")
    ran, out = Ran(directory, script), io.StringIO()
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "OPENBLAS_NUM_THREADS": "3"}
    with HostEngine(
        ["programs/program.py", "--word"], environ, ran.show, directory=directory
    ) as engine:
        ran.launch = engine._launch_id
        engine.fork_tasks(Console(out, out, {}))
        for index in range(7):
            engine.start(TaskConfig(job="job", index=index, workers=7))
        _wait(engine, ran, lambda: len(ran.ended) == 6 and "worker:5" in ran.lines)
        template = engine._template
        assert template is not None
        os.kill(template.pid, signal.SIGKILL)
        _wait(engine, ran, lambda: engine._template is None)
        engine.start(TaskConfig(job="job", index=EXITS, workers=7))
        ran.ended.pop(f"worker:{EXITS}")
        _wait(engine, ran, lambda: f"worker:{EXITS}" in ran.ended)
        ran.survived = psutil.Process(engine.pids["worker:5"]).is_running()
        engine.send_signal("worker:5", signal.SIGTERM)
        _wait(engine, ran, lambda: len(ran.ended) == 7)
        ran.pids = dict(engine.pids)
    ran.said = out.getvalue()
    yield ran


def _wait(engine: HostEngine, ran: Ran, until: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not until():
        assert time.monotonic() < deadline, (ran, sorted(ran.ended))
        for event in engine.wait(0.5):
            if isinstance(event, TaskEnded):
                ran.ended[event.name] = event


@pytest.mark.thorough
def test_a_task_is_a_child_of_the_launcher_in_a_session_of_its_own(ran: Ran) -> None:
    told = ran.told(0)
    assert (told["parent"], told["pid"]) == (os.getpid(), ran.pids["worker:0"])
    assert told["session"] == told["pid"]


def test_it_is_listed_under_the_command_line_of_a_task(ran: Ran) -> None:
    for index in TELLS:
        assert ran.told(index)["command"] == [
            *(sys.executable, "-m", "trireme", "--task", f"worker:{index}", str(os.getpid())),
            *("programs/program.py", "--word"),
        ]


def test_it_runs_the_program_as_python_would(ran: Ran) -> None:
    told = ran.told(0)
    assert told["argv"] == ["programs/program.py", "--word"]
    assert (told["name"], told["stdin"]) == ("__main__", "")
    assert (told["cwd"], told["path"]) == (str(ran.directory), str(ran.script.parent))


def test_its_environment_is_that_of_a_task(ran: Ran) -> None:
    told = ran.told(1)
    assert json.loads(told["task"])["index"] == 1
    assert told["blas"] == "3"  # and not the template's
    # The reaper finds it by this.
    assert f"{LAUNCH_VARIABLE}={ran.launch}" in told["environ"].split("\0")
    assert TASK_VARIABLE not in dict(os.environ)


def test_it_has_imported_torch_and_started_no_thread(ran: Ran) -> None:
    told = ran.told(0)
    assert told["loaded"]
    assert told["threads"] <= 3  # those of the BLAS, on a machine with as many cores


def test_tasks_draw_numbers_of_their_own_where_new_processes_do(ran: Ran) -> None:
    first, second = (ran.told(index) for index in TELLS)
    assert first["random"] != second["random"]
    assert first["numpy"] != second["numpy"]
    assert first["torch"] != second["torch"]


def test_its_end_is_that_of_any_program(ran: Ran) -> None:
    name = f"worker:{ENDS}"
    assert ran.ended[name].status == 0
    assert ran.lines[name] == ["no line endthread ended", "first registered 1"]
    assert (ran.directory / "unclosed").read_text() == "written"
    assert (ran.directory / "helpers").read_text() == "too"
    assert not list(ran.directory.glob("temporary-*"))


def test_its_failure_is_told(ran: Ran) -> None:
    end = ran.ended[f"worker:{FAILS}"]
    line = SCRIPT[: SCRIPT.index("raise ValueError")].count("\n") + 1
    assert (end.status, end.reason.summary) == (1, f"ValueError: wrong (program.py:{line})")
    assert "ValueError: wrong" in ran.errors[f"worker:{FAILS}"][-1]


def test_it_trains_with_threads_and_loads_with_processes(ran: Ran) -> None:
    assert ran.ended[f"worker:{COMPUTES}"].status == 0
    assert ran.lines[f"worker:{COMPUTES}"] == ["28.0 16777216.0"]


def test_without_the_template_tasks_live_on_and_others_are_spawned(ran: Ran) -> None:
    assert ran.survived
    assert ran.ended[f"worker:{WAITS}"].status in (-signal.SIGTERM, 130)
    assert ran.ended[f"worker:{EXITS}"].status == 7
    assert "was killed by SIGKILL" in ran.said
    assert "each task imports PyTorch by itself" in ran.said


def test_a_task_that_waits_for_the_template_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    with HostEngine(["program.py"], os.environ, lambda *_: None, directory=tmp_path) as engine:
        engine.fork_tasks(Console(io.StringIO(), io.StringIO(), {}))
        engine.start(TaskConfig(job="job"))
        engine.send_signal("worker:0", signal.SIGKILL)
        (end,) = engine.wait(SECONDS)
    assert isinstance(end, TaskEnded)
    assert (end.name, end.status, end.reason.kind) == ("worker:0", -signal.SIGKILL, "signal")


def test_a_template_that_cannot_import_torch_is_told_and_tasks_are_spawned(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('runs')")
    (tmp_path / "torch.py").write_text("raise ImportError('not this one')")
    lines, out = [], io.StringIO()
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}

    def show(name: str, line: bytes, error: bool) -> None:
        lines.append(line)

    with HostEngine(["program.py"], environ, show, directory=tmp_path) as engine:
        engine.fork_tasks(Console(out, out, {}))
        engine.start(TaskConfig(job="job"))
        events: list[Any] = []
        deadline = time.monotonic() + SECONDS
        while not any(isinstance(event, TaskEnded) for event in events):
            assert time.monotonic() < deadline
            events += engine.wait(0.5)
    assert isinstance(events[0], TaskLocated)
    assert lines == [b"runs"]
    assert "ended with status 1" in out.getvalue()


def test_a_template_that_is_never_ready_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme.fork.template.READY_SECONDS", 0.2)
    (tmp_path / "program.py").write_text("print('runs')")
    lines, out = [], io.StringIO()
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}

    def show(name: str, line: bytes, error: bool) -> None:
        lines.append(line)

    with HostEngine(["program.py"], environ, show, directory=tmp_path) as engine:
        engine.fork_tasks(Console(out, out, {}))
        assert engine._template is not None
        os.kill(engine._template.pid, signal.SIGSTOP)
        engine.start(TaskConfig(job="job"))
        deadline = time.monotonic() + SECONDS
        while not any(isinstance(event, TaskEnded) for event in engine.wait(0.1)):
            assert time.monotonic() < deadline
    assert lines == [b"runs"]
    assert "had not imported PyTorch after 0.2 s" in out.getvalue()


def test_where_an_engine_builds_commands_no_template_starts(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    show, out = (lambda *_: None), io.StringIO()
    with HostEngine(["program.py"], os.environ, show, lambda *_: ["true"]) as engine:
        engine.fork_tasks(Console(out, out, {}))
        assert engine._template is None


def test_a_program_that_sets_variables_before_torch_is_spawned(tmp_path: Path) -> None:
    source = "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n"
    (tmp_path / "program.py").write_text(textwrap.dedent(source))
    out = io.StringIO()
    with HostEngine(["program.py"], os.environ, lambda *_: None, directory=tmp_path) as engine:
        engine.fork_tasks(Console(out, out, {}))
        assert engine._template is None
    assert "program.py may set environment variables" in out.getvalue()
