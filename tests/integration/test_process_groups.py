"""Jobs whose processes hold the model together: what happens when one of them is gone."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.shell import PROGRAMS, Ended, Shell
from tests.integration.test_failures import pid_of, report

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TRAIN = (PROGRAMS / "train.py", "--out", "out")
JOBS = {
    "allreduce": ("--workers", 2),
    "pipeline": ("--workers", 2, "--strategy", "pipeline"),
    "graph": ("--workers", 2, "--strategy", "graph", "--microbatches", 2),
    "ps over dp": ("--ps", 2, "--workers", 2, "--mesh", "dp=2", "--strategy", "sync"),
    "ps over pp": ("--ps", 1, "--workers", 2, "--mesh", "pp=2", "--strategy", "sync"),
    "ps over graph": ("--ps", 1, "--workers", 2, "--mesh", "graph=2", "--strategy", "sync"),
}


def run(shell: Shell, job: str, *words: object, run_dir: str = "run") -> Ended:
    return shell.run("run", *JOBS[job], "--run-dir", run_dir, *words)


def result(shell: Shell, worker: int = 0) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a worker has left: its report and its values."""
    out = shell.directory / "out" / f"worker-{worker}"
    return json.loads(out.with_suffix(".json").read_text()), load_file(
        out.with_suffix(".safetensors")
    )


@pytest.mark.thorough
@pytest.mark.slow(but=("allreduce",))
@pytest.mark.parametrize("job", JOBS)
def test_a_killed_process_ends_the_job_and_is_named(job: str, shell: Shell) -> None:
    ended = run(shell, job, *TRAIN, "--fault", "1:5:before:kill", "--max-steps", 10**6)
    assert ended.status == 1
    assert report(ended).startswith("worker:1") and report(ended).endswith("killed by SIGKILL")
    assert "Traceback" not in ended.text
    killed = (shell.directory / "out" / "fault-1-5").stat().st_mtime
    assert time.time() - killed < 60


@pytest.mark.slow
@pytest.mark.parametrize("job", ["allreduce", "pipeline"])
def test_started_again_from_a_checkpoint_they_end_at_the_same_bits(
    job: str, shell: Shell, tmp_path: Path
) -> None:
    assert run(shell, job, *TRAIN, run_dir="undisturbed").status == 0
    _, wanted = result(shell)
    ended = run(
        shell,
        job,
        *("--max-restarts", 1, *TRAIN, "--fault", "1:20:before:kill", "--every-steps", 7),
    )
    assert ended.status == 0, ended.text
    assert "worker:1 was killed by SIGKILL; all workers are started again" in ended.text
    described, found = result(shell)
    assert described["global_step"] == 40 and described["restored_from"] in (7, 14)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.thorough
def test_one_that_is_stopped_is_named_by_the_others_and_may_go_on(shell: Shell) -> None:
    running = shell.start(
        *("run", *JOBS["allreduce"], "--run-dir", "run", *TRAIN, "--fault", "1:5:before:hang")
    )
    running.until(r"worker:0 \| waiting for worker:1.*worker:1 has not reported for . s; . s so")
    os.kill(pid_of(shell.directory / "run", "worker:1"), signal.SIGCONT)
    assert running.ended().status == 0


@pytest.mark.thorough
def test_an_exception_in_one_is_shown_once_and_the_others_are_victims(shell: Shell) -> None:
    ended = run(shell, "allreduce", *TRAIN, "--fault", "1:5:before:raise")
    assert ended.status == 1
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert report(ended).startswith("worker:1 failed: Injected: worker:1 at its step 5")
    assert "only waited or were stopped: worker:0" in ended.err


@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_that_differs_is_refused_by_name(shell: Shell) -> None:
    ended = run(shell, "pipeline", *TRAIN, "--odd-one-out")
    assert ended.status == 2
    assert "Traceback" not in ended.text
    assert "the models differ: parameter 0 is '0.weight' (32x20 float32" in report(ended)


@pytest.mark.slow(but=("pipeline",))
@pytest.mark.thorough
@pytest.mark.parametrize("job", ["pipeline", "ps over dp"])
def test_asked_to_stop_they_agree_on_a_step_and_the_chief_saves(job: str, shell: Shell) -> None:
    ended = run(shell, job, *TRAIN, "--max-steps", 10**6, "--fault", "1:20:before:stop job")
    assert ended.status == 130, ended.text
    (saved,) = sorted((shell.directory / "run" / "checkpoints").iterdir())
    assert saved.name.startswith("step-0000000")
