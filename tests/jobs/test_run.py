"""`trireme.run`: what it refuses, and jobs of real processes."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trireme
from tests.conftest import PYTHONPATH
from tests.metadata import forget, write_metadata
from trireme.launch.config.task_config import TASK_VARIABLE
from trireme.launch.run_directory import is_running, read_record


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test stands in a directory of its own, in an environment without our variables."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TRIREME_")]:
        monkeypatch.delenv(name)
    path = os.pathsep.join([PYTHONPATH, os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path


def test_its_options_are_documented() -> None:
    documented = inspect.getdoc(trireme.run) or ""
    for name in inspect.signature(trireme.run).parameters:
        assert name == "function_or_script" or re.search(rf"^ +\**{name}: ", documented, re.M)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrkers": 2}, r"no option wrkers \(did you mean workers\?\)"),
        ({"strategy": "snc", "ps": 1}, r"strategy is 'snc' \(run\(\)\).*did you mean sync\?"),
        ({"workers": 0}, r"workers is '0' \(run\(\)\): it must be a whole number from 1"),
        ({"strategy": trireme.Sync()}, r'give its name, and its values as options .*"sync"'),
        ({"replicas": 2, "ps": 1}, r"replicas is 2 \(run\(\)\)"),
        ({"on": "rocket"}, r"on is rocket \(run\(\)\): there is no engine rocket"),
        ({"config": "none.toml"}, r"none\.toml cannot be read"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_starts(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(trireme.UsageError) as refused:
        trireme.run(print, **options)
    assert re.search(message, str(refused.value))
    assert not list(tmp_path.iterdir())


def test_a_function_goes_to_tasks_of_this_host_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write_metadata(tmp_path, "ray")
    try:
        with pytest.raises(trireme.UsageError, match="on is ray: a function goes to processes of"):
            trireme.run(print, on="ray")
    finally:
        monkeypatch.undo()
        forget()


@pytest.mark.parametrize("timeout", ["5", 0, -1.0, True])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout: Any) -> None:
    with pytest.raises(trireme.ConfigurationError, match="must be a number of seconds"):
        trireme.run(learn, timeout=timeout)


@pytest.mark.parametrize("program", [None, 5, b"program.py"])
def test_what_is_neither_a_function_nor_a_script_is_refused(program: Any) -> None:
    with pytest.raises(trireme.ConfigurationError, match="give a function, or the path"):
        trireme.run(program)


@pytest.mark.parametrize("args", [5, "--depth 2"])
def test_arguments_that_are_no_list_are_refused(args: Any) -> None:
    with pytest.raises(trireme.ConfigurationError, match="give a list or tuple"):
        trireme.run(learn, args=args)


def test_a_job_that_is_not_waited_for_has_no_timeout() -> None:
    with pytest.raises(trireme.ConfigurationError, match=r"wait=False.*job\.wait"):
        trireme.run(learn, wait=False, timeout=5)


def test_a_run_directory_in_memory_is_refused() -> None:
    Path("program.py").write_text("pass\n")
    with pytest.raises(trireme.TriremeError, match="in the memory of one process"):
        trireme.run("program.py", run_dir="memory://bucket/run", verbose=False)


def test_a_script_or_module_that_is_not_there_is_refused() -> None:
    with pytest.raises(trireme.UsageError, match=r"there is no program nothing\.py"):
        trireme.run("nothing.py")
    with pytest.raises(trireme.UsageError, match="there is no module no_such_package"):
        trireme.run("-m no_such_package.train")


def test_a_task_of_a_job_starts_no_other_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TASK_VARIABLE, "{}")
    with pytest.raises(trireme.ConfigurationError, match="a task of a job already"):
        trireme.run(print)


def learn(steps: int, seen: list[int] | None = None) -> dict[str, Any]:
    """Trains a little; returns where it was."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    session = trireme.Session(
        nn.Linear(4, 1),
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        max_steps=steps,
        seed=3,
    )
    with session:
        for batch in session.loader(TensorDataset(inputs, inputs.sum(1, True)), batch_size=16):
            session.step(batch)
    return {"step": session.global_step, "pid": os.getpid(), "seen": seen}


@pytest.mark.processes
def test_a_function_trains_and_returns_and_can_be_looked_at() -> None:
    with trireme.run(learn, args=(40, [1, 2]), run_dir="run", wait=False, verbose=False) as job:
        returned = job.result(timeout=120)
    assert returned["step"] == 40 and returned["seen"] == [1, 2] and returned["pid"] != os.getpid()
    status = job.status()
    assert (status.state, status.step, status.max_steps) == ("finished", 40, 40)
    assert status.tasks == {}
    assert job.metrics["global_step"][-1] == 40
    assert len(job.metrics["time"]) == len(job.metrics["loss"])
    assert "finished" in job.logs("worker:0")
    with pytest.raises(trireme.ConfigurationError, match="there is output of: worker:0"):
        job.logs("worker:1")
    assert read_record(Path("run")).command[-1] == "learn()"
    assert not is_running(Path("run"))


@pytest.mark.thorough
@pytest.mark.processes
def test_an_exception_in_the_function_is_one_error_with_the_task_and_its_traceback() -> None:
    def fails() -> None:
        raise ValueError("boom")

    with pytest.raises(trireme.JobFailed) as failed:
        trireme.run(fails, verbose=False)
    text = str(failed.value)
    assert "First worker:0 failed: ValueError: boom (test_run.py:" in text
    assert "its traceback is below and in runs/fails/logs/worker-0.log" in text
    assert text.rstrip().endswith("ValueError: boom") and 'raise ValueError("boom")' in text


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.processes
def test_an_error_of_ours_shows_the_line_of_the_function() -> None:
    def fails() -> None:
        import torch

        trireme.Session(torch.nn.Linear(1, 1), None, None)  # type: ignore[arg-type]

    with pytest.raises(trireme.JobFailed) as failed:
        trireme.run(fails, verbose=False)
    report, _, lines = str(failed.value).partition("\n\nIn the program:\n")
    assert "First worker:0 failed: Session(Linear, NoneType, NoneType): write" in report
    assert "trireme.Session(torch.nn.Linear(1, 1), None, None)" in lines and "in fails" in lines
    assert "session.py" not in lines


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.thorough
def test_a_script_prints_as_trireme_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    Path("program.py").write_text("import sys\nprint('words', sys.argv[1:])\nsys.exit(3)\n")
    with pytest.raises(trireme.JobFailed, match=r"worker:0 failed: sys.exit\(3\)"):
        trireme.run("program.py", args=("--depth", 2))
    assert "worker:0 | words ['--depth', '2']" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.thorough
def test_servers_and_workers_of_a_closure(capsys: pytest.CaptureFixture[str]) -> None:
    steps = 30

    def train() -> dict[str, Any]:
        return learn(steps)

    returned = trireme.run(train, ps=1, workers=2, strategy="sync", run_dir="run")
    assert returned["step"] == 30
    assert "ps:0 | listens on" in capsys.readouterr().out


@pytest.fixture
def endless() -> Iterator[Any]:
    """A job that trains until it is stopped."""
    job = trireme.run(learn, args=(10**9,), run_dir="run", wait=False, verbose=False)
    try:
        yield job
    finally:
        job.stop()
        job.stop()
        assert job.wait(60)


def until_training(job: Any) -> None:
    deadline = time.monotonic() + 120
    while job.status().step == 0:
        assert time.monotonic() < deadline and job.error is None, job.error
        time.sleep(0.05)


@pytest.mark.processes
@pytest.mark.thorough
def test_a_job_that_is_stopped_has_saved_and_goes_on(endless: Any) -> None:
    until_training(endless)
    with pytest.raises(trireme.WaitTimeout):
        endless.result(timeout=0.01)
    with pytest.raises(trireme.ConfigurationError, match="a job runs in run already"):
        trireme.run(learn, args=(1,), run_dir="run", verbose=False)
    endless.stop()
    with pytest.raises(trireme.JobStopped, match="has saved; the same call goes on"):
        endless.result(timeout=90)
    assert endless.status().state == "interrupted"
    end = endless.status().step + 10
    assert trireme.run(learn, args=(end,), run_dir="run", verbose=False)["step"] == end


@pytest.mark.processes
@pytest.mark.thorough
def test_ctrl_c_stops_the_job_that_is_waited_for() -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + 120
        log = Path("run/logs/worker-0.log")
        while not (log.exists() and "training" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="has saved"):
        trireme.run(learn, args=(10**9,), run_dir="run", verbose=False)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert read_record(Path("run")).state == "interrupted"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.thorough
def test_a_job_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(trireme.WaitTimeout, match="has not ended within 2 s"):
        trireme.run(learn, args=(10**9,), run_dir="run", timeout=2.0, verbose=False)
    assert not is_running(Path("run"))


DIES = """
import os, signal, time
import trireme
from tests.jobs.test_run import learn

job = trireme.run(learn, args=(10**9,), run_dir="run", wait=False, verbose=False)
deadline = time.monotonic() + 120
while job.status().step == 0 and time.monotonic() < deadline:
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
@pytest.mark.thorough
def test_a_job_ends_with_the_python_that_has_started_it_and_saves() -> None:
    ended = subprocess.run([sys.executable, "-c", DIES], timeout=200)
    assert ended.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 100.0
    while is_running(Path("run")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert read_record(Path("run")).state == "interrupted"
    assert list(Path("run/checkpoints").glob("step-*"))
