"""Ctrl-C at a terminal: once saves and ends, twice ends at once."""

from __future__ import annotations

import os
import time

import pytest

from tests.integration.shell import PROGRAMS, Shell
from trireme.session.checkpoint import latest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

CTRL_C = b"\x03"
ENDLESS = (PROGRAMS / "train.py", "--out", "out", "--max-steps", 10**9)


def test_ctrl_c_saves_and_ends_with_130(shell: Shell) -> None:
    running, terminal = shell.start_at_terminal(
        *("run", "--ps", 1, "--workers", 2, "--strategy", "async", "--run-dir", "run"), *ENDLESS
    )
    for worker in range(2):
        running.until(rf"worker:{worker} \| .*global \d\d+/")
    os.write(terminal, CTRL_C)
    ended = running.ended()
    assert ended.status == 130, ended.text
    assert "stopping: the workers have 60 s to save and end" in ended.text
    assert "worker:0 | interrupted SIGINT to the launcher" in ended.text
    assert "Traceback" not in ended.text and "error" not in ended.text
    data = latest(shell.directory / "run", lambda path, error: pytest.fail(f"{path}: {error}"))
    assert data is not None and data.step >= 10
    assert f"saved run/checkpoints/step-{data.step:09d}-writer-1" in ended.text


@pytest.mark.thorough
@pytest.mark.slow(but=("allreduce",))
@pytest.mark.parametrize("servers", [(), ("--ps", 1)], ids=["allreduce", "async"])
def test_a_loop_of_its_own_that_is_stopped_ends_with_130(
    shell: Shell, servers: tuple[object, ...]
) -> None:
    """The program goes on after its loop, and its processes end with 0."""
    words = ("run", *servers, "--workers", 2, "--run-dir", "run")
    running = shell.start(*words, PROGRAMS / "loop.py", "--max-steps", 10**9)
    running.until(r"worker:0 \| training")
    stopped = shell.run("stop", "run")
    assert "has ended: interrupted" in stopped.text
    ended = running.ended()
    assert ended.status == 130, ended.text
    data = latest(shell.directory / "run", lambda path, error: pytest.fail(f"{path}: {error}"))
    assert data is not None


@pytest.mark.thorough
def test_two_ctrl_c_end_at_once(shell: Shell) -> None:
    running, terminal = shell.start_at_terminal(
        *("run", "--ps", 1, "--workers", 2, "--strategy", "sync", "--run-dir", "run"),
        *ENDLESS,
        *("--fault", "1:12:before:hang"),
    )
    running.until_there(shell.directory / "out/fault-1-12")
    os.write(terminal, CTRL_C)
    running.until("ask once more to end at once")
    time.sleep(0.3)  # two signals within 0.2 s are one: some tools send each twice
    began = time.monotonic()
    os.write(terminal, CTRL_C)
    ended = running.ended()
    assert time.monotonic() - began < 10, "worker 1 hangs, and nobody waits for it"
    assert ended.status == 1
    assert "did not save" in ended.text
    assert "Traceback" not in ended.text
