"""Jobs on a real Slurm of four nodes, all on this host: servers on two, workers on two."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.shell import PROGRAMS, ROOT, SECONDS, TRIREME, Ended, Running, Shell
from tests.integration.test_counting import consumed, notes, saved, table, updates
from tests.slurm.nodes import Slurm, four_nodes, missing

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        bool(missing()) or os.geteuid() != 0,
        reason="SLURM IS NOT TESTED: apt-get install slurm-wlm munge, and be root",
    ),
]

STEPS, BATCH = 1500, 4
TASKS = ("--ps", 2, "--replicas", 2, "--workers", 2, "--slurm-cpus-per-worker", 3)
"""With three cores for a worker, and three for two servers, each task has a node of its own."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    short = tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")
    with short as directory, four_nodes(Path(directory)) as cluster:
        yield cluster


@pytest.fixture
def idle(slurm: Slurm) -> Iterator[Slurm]:
    yield slurm
    slurm.run("scancel", "--state=RUNNING", "--user=root")
    slurm.run("scancel", "--user=root")
    slurm.wait_until_idle()


def allocated(shell: Shell, slurm: Slurm, *words: object) -> Running:
    """Starts `trireme run` in an allocation of all four nodes."""
    ask = ("salloc", "--quiet", "--nodes=4", "--exclusive", "--no-kill", *TRIREME)
    run = ("run", "--on", "slurm", "--run-dir", "run")
    return shell.start(*run, *words, environ=dict(slurm.environ), command=ask)


def counting(shell: Shell, slurm: Slurm, *words: object) -> Running:
    """Starts the counting program, which makes no pauses any more once it is released."""
    program = (PROGRAMS / "counting.py", "--out", "out", "--max-steps", STEPS, "--rows", 2)
    paces = ("--batch-size", BATCH, "--pause", 0.05, "--pause-until", "released")
    return allocated(shell, slurm, "--strategy", "async", *words, *program, *paces)


def places(shell: Shell) -> dict[str, str]:
    """The node of each task, by its name."""
    nodes = json.loads((shell.directory / "run" / "job.json").read_text())["nodes"]
    return {name: re.search(r"\((n[1-4])\)", node)[1] for name, node in nodes.items()}  # type: ignore[index]


def until_grown(path: Path, updates: int) -> None:
    """Waits until a worker has noted so many further updates."""
    begin, deadline = path.read_bytes().count(b"applied"), time.monotonic() + SECONDS
    while path.read_bytes().count(b"applied") < begin + updates:
        assert time.monotonic() < deadline, f"{path} does not grow"
        time.sleep(0.02)


def check_counts(shell: Shell, ended: Ended) -> list[float]:
    """Checks that each update is in the values once, and no example is lost."""
    assert ended.status == 0, ended.text
    data = saved(shell, STEPS)
    rows = updates(data)
    assert rows == [table(data)[worker] for worker in range(2)]
    assert sum(rows) == STEPS
    assert sum(stop - start for start, stop in consumed(data)) == STEPS * BATCH
    return rows


def test_servers_and_workers_train_on_four_nodes(shell: Shell, idle: Slurm) -> None:
    demo = (ROOT / "examples" / "digits.py", "--max-steps", 300)
    ended = allocated(shell, idle, *TASKS, "--strategy", "sync", *demo).ended()
    assert ended.status == 0, ended.text
    assert "worker:0 | test accuracy: 0.9" in ended.out
    assert "worker:1 | step 100" in ended.out
    assert len(set(places(shell).values())) == 4
    assert "test accuracy" in (shell.directory / "run" / "logs" / "worker-0.log").read_text()


def test_the_job_goes_on_without_nodes_that_fail(shell: Shell, idle: Slurm) -> None:
    running = counting(shell, idle, *TASKS, "--max-restarts", 2)
    for worker in range(2):
        running.until_there(shell.directory / "out" / f"notes-{worker}")
    lost = places(shell)
    for name in ("ps:1", "worker:1"):
        idle.kill_node(lost[name])
    try:
        for name in ("ps:1", "worker:1"):
            running.until(rf"{name} (was|failed:) lost with its agent on node \S+ \({lost[name]}\)")
        until_grown(shell.directory / "out" / "notes-0", 50)
        until_grown(shell.directory / "out" / "notes-1", 10)
        assert not {lost["ps:1"], lost["worker:1"]} & set(places(shell).values())
        (shell.directory / "released").touch()
        rows = check_counts(shell, running.ended())
    finally:
        for name in ("ps:1", "worker:1"):
            idle.start_node(lost[name])
    first, second = (notes(shell, worker) for worker in range(2))
    assert first["attempted"] == first["applied"] == rows[0]
    # Of the update that was under way nobody but the servers knows what became.
    assert second["applied"] <= rows[1] <= second["attempted"] <= second["applied"] + 1


def test_a_signal_to_all_steps_saves(shell: Shell, idle: Slurm) -> None:
    running = counting(shell, idle, *TASKS)
    running.until_there(shell.directory / "out" / "notes-1")
    until_grown(shell.directory / "out" / "notes-1", 20)
    idle.run("scancel", "--signal=TERM", "--user=root")
    ended = running.ended()
    assert ended.status == 130, ended.text
    assert list((shell.directory / "run" / "checkpoints").glob("step-*"))


def test_a_job_whose_time_is_over_goes_on_when_it_is_queued_again(
    shell: Shell, idle: Slurm
) -> None:
    program = ("--out", "out", "--max-steps", STEPS, "--rows", 2, "--batch-size", BATCH)
    paces = ("--pause", 0.05, "--pause-until", "released")
    component = ("--server-nodes", 2, "--nodes", 2, "--strategy", "async")
    script = shell.run(
        *("slurm", "script", *component, *TASKS, "--run-dir", "run"),
        *(PROGRAMS / "counting.py", *program, *paces),
        environ=dict(idle.environ),
    )
    assert script.status == 0, script.text
    text = script.out.replace("\ntrireme run", f"\n{' '.join(TRIREME)} run")
    (shell.directory / "job.sh").write_text(text)
    queued = shell.start("--wait", "job.sh", environ=dict(idle.environ), command=("sbatch",))
    queued.until_there(shell.directory / "out" / "notes-1")
    until_grown(shell.directory / "out" / "notes-1", 20)
    (job,) = {
        line.partition("+")[0]
        for line in idle.run("squeue", "-h", "-o", "%i", "--states=RUNNING").splitlines()
    }
    idle.run("scancel", "--signal=TERM", "--batch", job)  # as Slurm does before the time is over
    until_grown(shell.directory / "out" / "notes-0", 60)
    (shell.directory / "released").touch()
    queued.ended()
    (output,) = shell.directory.glob("counting-*.txt")
    said = output.read_text()
    assert "interrupted SIGTERM to the launcher" in said, said
    assert re.search(r"trireme: finished in ", said), said
    data = saved(shell, STEPS)
    assert sum(updates(data)) == STEPS
    assert sum(stop - start for start, stop in consumed(data)) == STEPS * BATCH


def test_a_launcher_that_is_killed_leaves_nothing_behind(shell: Shell, idle: Slurm) -> None:
    running = counting(shell, idle, *TASKS)
    running.until_there(shell.directory / "out" / "notes-1")
    record = json.loads((shell.directory / "run" / "job.json").read_text())
    os.kill(record["launcher"], signal.SIGKILL)
    running.ended()
    idle.wait_until_idle()
    shell.assert_nothing_left()


def test_outside_of_an_allocation_one_line_says_what_to_do(shell: Shell, tmp_path: Path) -> None:
    ended = shell.run("run", "--on", "slurm", "--ps", 1, ROOT / "examples" / "digits.py")
    assert ended.status == 2
    assert "SLURM_JOB_ID is not set" in ended.err
