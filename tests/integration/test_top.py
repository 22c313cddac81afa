"""`trireme top` at a terminal, while a job runs and after it."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from tests.integration.shell import PROGRAMS, Shell
from trireme.launch.run_directory import read_record

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TRAIN = (PROGRAMS / "train.py", "--out", "out")


@pytest.mark.slow
def test_a_stopped_worker_is_named_within_two_seconds_and_the_end_is_shown(shell: Shell) -> None:
    job = shell.start(
        *("run", "--ps", 1, "--workers", 2, "--strategy", "sync", "--run-dir", "run"),
        *(*TRAIN, "--max-steps", 10**9, "--pause", 0.01),
    )
    job.until(r"worker:1 \| step 10 ")
    top, _ = shell.start_at_terminal("top", "run")
    top.until(r"worker:1.*?training")
    straggler = read_record(shell.directory / "run").pids["worker:1"]
    stopped = time.monotonic()
    os.kill(straggler, signal.SIGSTOP)
    try:
        top.until(r"! worker:1 has said nothing for|waits for worker:1 ")
        assert time.monotonic() - stopped < 2.0
        top.until(r"worker:0 waits for\s+worker:1 \(round \d+\)")
        status = json.loads(shell.run("status", "--json", "run").out)
        assert any("worker:1" in finding for finding in status["findings"])
    finally:
        os.kill(straggler, signal.SIGCONT)
    assert shell.run("stop", "run").status == 0
    assert job.ended().status == 130
    ended = top.ended()
    assert ended.status == 0
    last = ended.out.rpartition("\x1b[?1049l")[2]  # what stays on the screen of before
    assert re.search(r"interrupted after \d", last) and "ps:0" in last and "worker:1" in last

    lines = shell.run("top", "run").out.splitlines()
    assert len(lines) == 1
    assert re.search(r"interrupted  global step [1-9]\d*/1000000000  [\d,]+ examples/s", lines[0])
    status = json.loads(shell.run("status", "--json", "run").out)
    told = {task["name"]: task["status"] for task in status["tasks"]}
    assert told["worker:1"]["wait_seconds"] > 0
    assert told["ps:0"]["applied"] > 0
    assert told["ps:0"]["global_step"] == told["worker:1"]["global_step"], "as all ended"


def test_a_directory_in_which_nothing_ran_is_said_to_be_so(shell: Shell) -> None:
    ended = shell.run("top", "out")
    assert ended.status == 2
    assert "nothing was run in out" in ended.err
