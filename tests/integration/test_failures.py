"""What goes wrong, and what a user reads of it: one clear error, the right status, nothing left.

What concerns tasks started by hand is in `test_by_hand.py`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from images.mnist import FILES

from tests.integration.shell import PROGRAMS, Ended, Shell
from trireme.launch.run_directory import read_record
from trireme.session.checkpoint import list_checkpoints, step_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TRAIN = (PROGRAMS / "train.py", "--out", "out")


def run(shell: Shell, *words: object, strategy: str = "sync") -> Ended:
    """Runs two workers and a server, in which something goes wrong."""
    return shell.run(
        *("run", "--ps", 1, "--workers", 2, "--strategy", strategy, "--run-dir", "run"),
        *(*TRAIN, *words),
    )


def errors(ended: Ended) -> list[str]:
    """The lines in which tasks say what is wrong with them."""
    return re.findall(r"^(?:\S+ \| )?error: (.*)$", ended.err, re.MULTILINE)


def report(ended: Ended) -> str:
    """The launcher's report: who failed first, and why."""
    (found,) = re.findall(r"^trireme: the job failed after \S+ s\. First (.*)$", ended.err, re.M)
    return str(found)


def test_an_exception_in_one_worker_is_shown_once_and_ends_the_job(shell: Shell) -> None:
    ended = run(shell, "--fault", "1:5:before:raise")
    assert ended.status == 1
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert ended.err.count("worker:1 | tests.faults.hook.Injected: worker:1 at its step 5") == 1
    assert "runpy" not in ended.err and "trireme/launch" not in ended.err
    assert errors(ended) == []
    assert report(ended).startswith("worker:1 failed: Injected: worker:1 at its step 5 (train.py:")
    assert "only waited or were stopped: ps:0, worker:0" in ended.err


@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_that_differs_names_the_first_parameter_that_does(shell: Shell) -> None:
    ended = run(shell, "--odd-one-out")
    assert ended.status == 2
    assert "Traceback" not in ended.text
    (error,) = errors(ended)  # of whichever worker came second
    assert "the models differ: parameter 0 is '0.weight' (" in error
    assert "32x20 float32" in error and "33x20 float32" in error
    assert "the models differ" in report(ended)


@pytest.mark.slow
@pytest.mark.thorough
def test_an_optimizer_that_the_server_lacks_is_refused_by_name(shell: Shell) -> None:
    ended = run(shell, "--optimizer", "Adafactor")
    assert ended.status == 2
    assert "Traceback" not in ended.text
    assert errors(ended)
    assert all("has no optimizer torch.optim.Adafactor" in error for error in errors(ended))
    assert "training" not in ended.out


@pytest.mark.slow
@pytest.mark.thorough
def test_a_missing_data_file_is_named(shell: Shell) -> None:
    ended = shell.run("run", *TRAIN, "--data-dir", "nowhere")
    assert ended.status == 1
    (error,) = errors(ended)
    assert error.startswith("nowhere has neither train-images-idx3-ubyte nor ")
    assert "Traceback" not in ended.text


@pytest.mark.slow
@pytest.mark.thorough
def test_a_damaged_data_file_is_named(shell: Shell) -> None:
    folder = shell.directory / "data"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_bytes(b"\x00\x00\x08\x03\x00\x00\x00\x05")  # and nothing of five
    ended = shell.run("run", *TRAIN, "--data-dir", "data")
    assert ended.status == 1
    (error,) = errors(ended)
    assert f"data/{FILES[0]}" in error
    assert "Traceback" not in ended.text


def test_an_unknown_option_suggests_one(shell: Shell) -> None:
    ended = shell.run("run", "--wrokers", 2, *TRAIN)
    assert ended.status == 2
    assert ended.out == ""
    assert ended.err.splitlines() == [ended.err.rstrip()]
    assert "did you mean --workers?" in ended.err


@pytest.mark.thorough
def test_a_killed_server_fails_the_job_by_name_soon(shell: Shell) -> None:
    running = shell.start(
        *("run", "--ps", 2, "--workers", 2, "--strategy", "async", "--run-dir", "run"),
        *(*TRAIN, "--max-steps", 10**9, "--pause", 0.01),
    )
    running.until(r"worker:1 \| step 10 ")
    os.kill(pid_of(shell.directory / "run", "ps:1"), signal.SIGKILL)
    killed = time.monotonic()
    ended = running.ended()
    assert time.monotonic() - killed < 15
    assert ended.status == 1
    assert report(ended) == "ps:1 was killed by SIGKILL"
    assert "Traceback" not in ended.text


@pytest.mark.slow
def test_a_killed_server_costs_what_was_learned_since_the_checkpoint(shell: Shell) -> None:
    words = ("run", "--ps", 2, "--workers", 2, "--strategy", "async", "--run-dir", "run", *TRAIN)
    running = shell.start(*words, "--max-steps", 10**9, "--every-steps", 200)
    running.until(r"saved .*step-00000\d\d\d\d-writer")
    # What the workers have is newer than what is saved.
    running.until(r"\(global ([3-9]\d\d|\d{4,})/")
    os.kill(pid_of(shell.directory / "run", "ps:1"), signal.SIGKILL)
    ended = running.ended()
    assert ended.status == 1
    newest = step_of(list_checkpoints(shell.directory / "run")[-1])
    said = re.findall(
        r"^trireme:   ps:1 was lost at step (\d+) or a little later\. The "
        rf"newest checkpoint is of step {newest}: (\d+) steps, or a few more, are lost; with "
        r"--replicas 2 it goes on when a server dies$",
        ended.err,
        re.M,
    )
    assert len(said) == 1, ended.text
    ((reached, lost),) = said
    assert int(reached) - int(lost) == newest
    assert "Traceback" not in ended.text

    again = shell.run(*words, "--max-steps", newest + 20)
    assert again.status == 0
    assert f"restoring step {newest}" in again.text


def pid_of(run_dir: Path, task: str) -> int:
    pid = read_record(run_dir).pids[task]
    assert psutil.pid_exists(pid)
    return pid


STARTS_CHILDREN = """
import subprocess, sys
sys.argv[0] = {train!r}
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1000"], start_new_session=True)
exec(compile(open({train!r}).read(), {train!r}, "exec"))
"""


def test_when_the_launcher_is_killed_nothing_is_left_of_what_its_tasks_started(
    shell: Shell,
) -> None:
    (shell.directory / "program.py").write_text(STARTS_CHILDREN.format(train=str(TRAIN[0])))
    running = shell.start(
        *("run", "--ps", 1, "--workers", 2, "--run-dir", "run", "program.py"),
        *(*TRAIN[1:], "--max-steps", 10**9, "--pause", 0.01),
    )
    running.until(r"worker:1 \| step 10 ")
    sleeping = [p for p in shell.processes() if p.name() == "sleep"]
    assert len(sleeping) == 4
    running.send(signal.SIGKILL)
    running.ended()
    deadline = time.monotonic() + 15
    while shell.processes():
        assert time.monotonic() < deadline, [p.cmdline() for p in shell.processes()]
        time.sleep(0.05)


@pytest.mark.thorough
def test_a_program_that_opens_no_session_has_not_finished(shell: Shell) -> None:
    (shell.directory / "program.py").write_text("print('nothing to train')")
    ended = shell.run("run", "--ps", 1, "--workers", 2, "--run-dir", "run", "program.py")
    assert ended.status == 2
    assert "its program ended before the job had begun" in report(ended)
    assert "trireme: finished" not in ended.err
