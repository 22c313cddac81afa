"""A worker is stopped (SIGSTOP), and perhaps goes on later: its launcher ends in time, and rightly.

The program is `programs/counting.py`, so what the job achieved is counted.
"""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.integration.shell import PROGRAMS, Running, Shell
from tests.integration.test_counting import consumed, notes, saved, table, updates
from trireme.launch.run_directory import read_record

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 60
GIVEN_UP = r"worker:1 was given up and killed: it sent nothing for 1\d\.\d s"


def start(shell: Shell, fault: str, *, restarts: int = 0, wait_for: int = 0) -> Running:
    """Starts the counting program on a server and two workers, one of which will hang."""
    return shell.start(
        *("run", "--ps", 1, "--workers", 2, "--strategy", "async", "--run-dir", "run"),
        *("--max-restarts", restarts, PROGRAMS / "counting.py", "--out", "out"),
        *("--max-steps", STEPS, "--fault", fault, "--wait-for", wait_for),
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_a_worker_that_hangs_over_the_end_does_not_hang_the_launcher(shell: Shell) -> None:
    ended = start(shell, "1:5:in flight:hang", wait_for=5).ended()
    assert ended.status == 0, ended.text
    assert re.search(GIVEN_UP, ended.err), ended.err
    assert "trireme: finished in " in ended.err
    data = saved(shell, STEPS)
    rows = updates(data)
    assert rows == [table(data)[0], table(data)[1]] and sum(rows) == STEPS


@pytest.mark.slow
@pytest.mark.thorough
def test_a_worker_that_goes_on_after_the_end_does_not_fail_the_job(shell: Shell) -> None:
    running = start(shell, "1:5:before:hang", wait_for=4)
    running.until(r"worker:0 \| finished")
    os.kill(read_record(shell.directory / "run").pids["worker:1"], signal.SIGCONT)
    ended = running.ended()
    assert ended.status == 0, ended.text
    assert "trireme: finished in " in ended.err
    assert sum(updates(saved(shell, STEPS))) == STEPS


@pytest.mark.thorough
def test_a_worker_that_hangs_is_started_again_where_that_is_allowed(shell: Shell) -> None:
    running = start(shell, "1:5:before:hang", restarts=1, wait_for=9)
    ended = running.ended()
    assert ended.status == 0, ended.text
    again = r"worker:1 failed: given up and killed: .*; started again \(1 of 1\)"
    assert re.search(again, ended.err), ended.err
    data = saved(shell, STEPS)
    assert updates(data) == [table(data)[0], table(data)[1]]
    assert notes(shell, 1)["attempted"] >= 9
    assert sum(stop - start for start, stop in consumed(data)) == STEPS * 4


@pytest.mark.thorough
def test_a_server_that_hangs_starts_the_job_again(shell: Shell) -> None:
    running = shell.start(
        *("run", "--ps", 1, "--workers", 1, "--max-restarts", 1, "--run-dir", "run"),
        *(PROGRAMS / "counting.py", "--out", "out", "--max-steps", 10**6),
    )
    running.until(r"worker:0 \| step 100 ")
    os.kill(read_record(shell.directory / "run").pids["ps:0"], signal.SIGSTOP)
    running.until(r"ps:0 was given up and killed: .*; the whole job is started again")
    running.until(r"worker:0 \| training[\s\S]*worker:0 \| training")
    running.send(signal.SIGTERM)
    ended = running.ended()
    assert ended.status == 130, ended.text


# The fault's moment is one that the disk sees, not a method of ours that a save may pass by.
DIES_SAVING = """
import os, pathlib, signal, sys, time

def writers():  # a name with a dot is of an entry that is not there yet
    return sum(not name.startswith(".") for name in os.listdir("run/writers"))

def await_another(entries):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and writers() <= entries:
        time.sleep(0.05)

def die_first(event, arguments):
    if event != "os.rename" or {last!r} not in os.fsdecode(arguments[1]):
        return
    note = pathlib.Path("out/died")
    if not note.exists():
        note.touch()
        signal.raise_signal(signal.{signal})  # to this thread: it must not go on and rename
    elif {waits} and not pathlib.Path("out/waited").exists():
        pathlib.Path("out/waited").touch()
        await_another(writers())

sys.addaudithook(die_first)
sys.argv[0] = {program!r}
exec(compile(open({program!r}).read(), {program!r}, "exec"))
"""


def dies_saving(shell: Shell, number: str, *, waits: bool = False) -> tuple[object, ...]:
    """The counting program, whose chief is hit right before its last checkpoint gets its name.

    Args:
        shell: runs it.
        number: the signal.
        waits: whether who saves next waits until another worker has taken the directory.
    """
    program = DIES_SAVING.format(
        last=f"/step-{STEPS:09d}-",
        signal=number,
        program=str(PROGRAMS / "counting.py"),
        waits=waits,
    )
    (shell.directory / "program.py").write_text(program)
    return ("program.py", "--out", "out", "--max-steps", STEPS)


def was_hit(shell: Shell) -> bool:
    """Whether a chief was hit while it saved: without that these tests prove nothing."""
    return (shell.directory / "out" / "died").exists()


@pytest.mark.thorough
@pytest.mark.slow(but=("SIGKILL",))
@pytest.mark.parametrize("number", ["SIGSTOP", "SIGKILL"])
def test_another_worker_saves_the_end_that_a_chief_did_not(shell: Shell, number: str) -> None:
    ended = shell.run(
        *("run", "--ps", 1, "--workers", 2, "--strategy", "async", "--run-dir", "run"),
        *dies_saving(shell, number),
    )
    assert was_hit(shell), ended.text
    assert sum(updates(saved(shell, STEPS))) == STEPS
    assert ended.status == 0, ended.text
    assert re.search(r"WARNING: worker:0 was ", ended.err), ended.err


@pytest.mark.slow(but=("when the chief is back",))
@pytest.mark.thorough
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "when the chief is back"])
def test_where_restarts_are_allowed_the_end_is_saved_by_one_of_them(
    shell: Shell, waits: bool
) -> None:
    """A chief that is back takes the directory from the worker that saves in its place."""
    ended = shell.run(
        *("run", "--ps", 1, "--workers", 2, "--strategy", "async", "--run-dir", "run"),
        *("--max-restarts", 1, *dies_saving(shell, "SIGKILL", waits=waits)),
    )
    assert was_hit(shell), ended.text
    assert (shell.directory / "out" / "waited").exists() == waits, ended.text
    assert ended.status == 0, ended.text
    assert sum(updates(saved(shell, STEPS))) == STEPS
