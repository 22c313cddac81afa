"""Jobs whose tasks compute one dataflow graph: their memory, their faults, their traces."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.shell import PROGRAMS, Ended, Shell
from tests.integration.test_failures import pid_of, report
from tests.tracing import read_trace, tasks_of
from trireme.cli import main
from trireme.session.checkpoint import latest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

GRAPH = ("--workers", 2, "--strategy", "graph")
TOWERS = (PROGRAMS / "towers.py", "--out", "out")
WIDTH = 2176
"""Of eight layers, which are 150 MB; with gradients 300 MB."""
LIMIT = 200_000_000


def run(shell: Shell, *words: object, run_dir: str = "run") -> Ended:
    return shell.run("run", *GRAPH, "--run-dir", run_dir, *words)


# Memory ----------------------------------------------------------------------------------------


def big(shell: Shell, width: int, *words: object) -> list[dict[str, Any]]:
    """What each task says of a model of a width."""
    folder = f"run-{width}"
    ended = run(
        shell, *words, PROGRAMS / "big.py", "--out", "out", "--width", width, run_dir=folder
    )
    assert ended.status == 0, ended.text
    out = shell.directory / "out"
    return [json.loads((out / f"big-{task}.json").read_text()) for task in (0, 1)]


@pytest.mark.slow
@pytest.mark.thorough
def test_each_task_stays_within_its_memory_limit(shell: Shell) -> None:
    """The model is created, trained, evaluated and saved."""
    small = big(shell, 16)
    large = big(shell, WIDTH, "--memory-limit", "200MB")
    took = [one["peak"] - other["peak"] for one, other in zip(large, small, strict=True)]
    assert all(50e6 < peak <= LIMIT for peak in took), took
    assert large[0]["losses"] == large[1]["losses"]
    saved = latest(shell.directory / f"run-{WIDTH}", _fail)
    assert saved is not None and sum(each.nbytes for each in saved.model.values()) > 1.5e8


def _fail(path: Path, error: Exception) -> Any:
    raise AssertionError(f"{path}: {error}")


# Faults ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_task_is_named_and_a_killed_one_ends_the_job(victim: int, shell: Shell) -> None:
    running = shell.start(
        *("run", *GRAPH, "--run-dir", "run", *TOWERS, "--max-steps", 10**6),
        *("--fault", "1:20:before:hang"),
    )
    running.until(r"worker:0 \| waiting for worker:1.*worker:1 has not reported for . s; . s so")
    os.kill(pid_of(shell.directory / "run", f"worker:{victim}"), signal.SIGKILL)
    ended = running.ended(10.0)
    assert ended.status == 1
    assert report(ended).startswith(f"worker:{victim}"), ended.text
    assert report(ended).endswith("killed by SIGKILL")
    assert "Traceback" not in ended.text and "terminate called" not in ended.text


@pytest.mark.slow
@pytest.mark.thorough
def test_started_again_from_a_checkpoint_they_end_at_the_same_bits(shell: Shell) -> None:
    # Another number of micro-batches rounds otherwise, and the cost model measures.
    fixed = ("--microbatches", 2)
    assert run(shell, *fixed, *TOWERS, run_dir="undisturbed").status == 0
    wanted = torch.load(shell.directory / "out" / "end.pt")
    ended = run(
        shell,
        *(*fixed, "--max-restarts", 1, *TOWERS),
        *("--fault", "1:20:before:kill", "--every-steps", 7),
    )
    assert ended.status == 0, ended.text
    assert "worker:1 was killed by SIGKILL; all workers are started again" in ended.text
    found = torch.load(shell.directory / "out" / "end.pt")
    assert wanted.pop("restored") == 0 and found.pop("restored") in (7, 14)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# What is shown ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
def test_the_towers_compute_at_the_same_time(shell: Shell) -> None:
    """The table says where each operation is, and the trace when it was computed."""
    ended = run(
        *(shell, "--log-placement", "--profile", "6:9", "--microbatches", 2, *TOWERS),
        *("--max-steps", 12, "--width", 20000, "--batch-size", 64),
    )
    assert ended.status == 0, ended.text
    for line in (r"left\S* .*worker:0/cpu", r"right\S* .*worker:1/cpu"):
        assert re.search(line, ended.out), ended.out
    assert "ms a step (within the requests)" in ended.out
    traces = list((shell.directory / "run" / "traces").iterdir())
    assert [path.name for path in traces] == ["steps-6-9.json.gz"]
    events = read_trace(traces[0])
    tasks = tasks_of(events)
    assert tasks == {"worker:0": 1, "worker:1": 2}
    spans = {
        task: [
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["pid"] == number and event.get("cat") == "stage"
        ]
        for task, number in tasks.items()
    }
    assert all(len(each) >= 3 * 2 * 2 for each in spans.values())
    together = sum(
        max(0.0, min(stop, until) - max(start, since))
        for start, stop in spans["worker:0"]
        for since, until in spans["worker:1"]
    )
    least = min(sum(stop - start for start, stop in each) for each in spans.values())
    assert together > 0.1 * least, (together, least)


# Options that contradict each other ------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mesh", "graph=2,tp=2"), "mesh graph=2 with tp=2"),
        (("--mesh", "graph=2,pp=2"), "mesh graph=2 with pp=2"),
        (("--strategy", "graph", "--ps", 1), "use --mesh graph=2"),
        (("--strategy", "sync", "--ps", 1, "--memory-limit", "1GB"), "add --mesh graph=2"),
        (("--strategy", "fsdp", "--log-placement"), "and there is no graph"),
        (("--strategy", "graph", "--memory-limit", "much"), "it must be a size, such as 500MB"),
        (("--strategy", "graph", "--memory-limit", "0.1B"), "it must be a size, such as 500MB"),
        (("--strategy", "graph", "--microbatches", 0), "microbatches is '0'"),
        (("--strategy", "graph", "--schedule", "interleaved"), "there is no pipeline"),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_anything_starts(
    words: tuple[object, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--workers", "4", *map(str, (*words, *TOWERS))]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert not (tmp_path / "runs").exists() and "worker:" not in told.out
