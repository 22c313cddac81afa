from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trireme
from benchmarks.processes import free_ports
from trireme.environments.flags import split_flags
from trireme.errors import UsageError
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.environment import detect

HOSTS = ["--ps_hosts=localhost:2222", "--worker_hosts=localhost:1,localhost:2"]
WORKER = ["--job_name=worker", "--task_index=1", *HOSTS]


@pytest.mark.parametrize(
    "words",
    [
        WORKER,
        ["--job-name", "worker", "--task-index", "1", *HOSTS],
        ["-job_name=worker", "-task_id=1", *HOSTS],
        ["--lr", "0.1", *reversed(WORKER), "file"],
    ],
)
def test_a_program_is_the_task_that_its_flags_name(
    words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "TRIREME_RUN_DIR": "r"}
    task = detect(environ, tmp_path, words)
    assert (task.name, task.workers, task.servers) == ("worker:1", 2, 1)
    assert (task.coordinator, task.config.output.run_dir) == ("tcp://localhost:2222", "r")
    assert caplog.messages == [
        "worker:1 by the flags on the command line (--job_name, ...): 2 workers, "
        "servers at localhost:2222"
    ]
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert detect(environ | torchrun, tmp_path, words).servers == 1
    assert detect({TASK_VARIABLE: encode_task(TaskConfig(job="j"))}, tmp_path, words).job == "j"


@pytest.mark.parametrize(
    ("words", "strategy", "aggregate"),
    [
        (["--sync_replicas", "--replicas_to_aggregate=2"], "sync", 2),
        (["--sync_replicas", "true", "x"], "sync", None),
        (["--sync_replicas=False"], None, None),
        ([], None, None),
    ],
)
def test_the_classic_strategy(
    words: list[str], strategy: str | None, aggregate: int | None, tmp_path: Path
) -> None:
    task = detect({"XDG_CONFIG_HOME": str(tmp_path)}, tmp_path, [*WORKER, *words])
    assert (task.config.training.strategy, task.config.training.aggregate) == (strategy, aggregate)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--job_name=x", "--worker_hosts=4"],  # flags of the program's own
        ["--job_name=worker", "--worker_hosts=4"],
        ["--job_name=worker", "--task_index=one", *HOSTS],
        ["--job_name=wroker", *HOSTS],
        ["--job_name=nightly"],  # a flag of the program's own
        ["--task_index=1", "--sync_replicas"],
        ["--ps_hosts=localhost:2222", "--worker_hosts=localhost:1"],
        ["--", *WORKER],
        ["train", "--job_names=worker", "--ps_hosts=a:1"],
    ],
)
def test_what_names_no_cluster_is_the_programs_own(words: list[str]) -> None:
    assert split_flags(words) == ({}, words)
    assert detect({}, arguments=words).servers == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--job_name=worker", "--ps_hosts=a:1"], "--worker-hosts is missing"),
        (["--job_name=ps"], "no flag says of which: add --ps_hosts and --worker_hosts"),
        (["--job_name=chief", *HOSTS], "--job-name is 'chief'"),
        (["--job_name=worker", "--task_index=2", *HOSTS], "worker:0 to worker:1"),
        ([*WORKER, "--sync_replicas=maybe"], "--sync-replicas is 'maybe'"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        detect({}, arguments=words)


def test_the_other_arguments_are_for_the_programs_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TASK_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["program.py", "--lr", "1", *WORKER, "file"])
    assert trireme.program_arguments() == ["--lr", "1", "file"]
    assert sys.argv[1:] == ["--lr", "1", *WORKER, "file"]  # a program that reads them keeps them
    monkeypatch.setenv(TASK_VARIABLE, encode_task(TaskConfig(job="j")))
    assert trireme.program_arguments() == ["--lr", "1", *WORKER, "file"]


PROGRAM = """
import argparse, torch, trireme
from torch.utils.data import TensorDataset
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
given = parser.parse_args(trireme.program_arguments())
inputs = torch.randn(64, 4)
session = trireme.Session(torch.nn.Linear(4, 1), torch.nn.MSELoss(),
    lambda params: torch.optim.SGD(params, lr=0.1), max_steps=given.steps)
with session:
    for batch in session.loader(TensorDataset(inputs, inputs.sum(1, True)), batch_size=16):
        session.step(batch)
print(session.task.name, "ends at", session.global_step)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_python_starts_a_cluster_as_in_the_classic_tutorials(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (port,) = free_ports(1)
    hosts = [f"--ps_hosts=localhost:{port}", "--worker_hosts=localhost:1,localhost:2"]
    tasks = [("ps", 0), ("worker", 0), ("worker", 1)]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TRIREME_")}
    environ["XDG_CONFIG_HOME"] = str(tmp_path)
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "program.py", "--steps", "20"),
                *(f"--job_name={role}", f"--task_index={index}", *hosts),
            ],
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role, index in tasks
    ]
    ends = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], ends
    (server, _), (first, said), (second, _) = ends
    assert f"ps:0 listens on tcp://localhost:{port}" in server
    assert "worker:0 ends at 20" in first
    assert "worker:1 ends at 20" in second
    assert "worker:0 by the flags on the command line (--job_name, ...): 2 workers" in said
