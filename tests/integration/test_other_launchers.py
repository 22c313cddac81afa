"""Programs that others start: torchrun for real, Slurm, MPI and TensorFlow's by what they set."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence

import pytest

from benchmarks.processes import free_ports
from tests.integration.shell import PROGRAMS, PYTHON, ROOT, TORCHRUN, Ended, Shell

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TRAIN = (PROGRAMS / "train.py", "--out", "out")
DIGITS = (ROOT / "examples" / "digits.py", "--max-steps", 60)
QUIET = {"TRIREME_JOIN_TIMEOUT": "60"}


def report(shell: Shell, index: int) -> dict[str, object]:
    said = (shell.directory / "out" / f"worker-{index}.json").read_text()
    found: dict[str, object] = json.loads(said)
    return found


def start_all(
    shell: Shell, environs: Sequence[dict[str, str]], *words: object
) -> tuple[Ended, ...]:
    """Runs one process for each environment, to the end of all."""
    running = [shell.start(*words, environ=QUIET | e, command=PYTHON) for e in environs]
    return tuple(process.ended() for process in running)


@pytest.mark.slow
@pytest.mark.thorough
def test_torchrun_starts_the_demo_as_it_stands(shell: Shell) -> None:
    ended = shell.start("--nproc-per-node", 2, *DIGITS, command=TORCHRUN).ended()
    assert ended.status == 0, ended.text
    assert len(re.findall(r"^test accuracy: ", ended.out, re.MULTILINE)) == 1
    assert ended.out.count("step-000000060") == 1
    state = shell.directory / "runs/digits/checkpoints/step-000000060-writer-1/state.json"
    assert json.loads(state.read_text())["state"]["workers"] == 2


@pytest.mark.slow
@pytest.mark.thorough
def test_after_torchrun_s_restart_it_goes_on_from_the_newest_checkpoint(shell: Shell) -> None:
    ended = shell.start(
        *("--nproc-per-node", 2, "--max-restarts", 1, *TRAIN),
        *("--every-steps", 5, "--max-steps", 30, "--fault", "1:18:before:kill"),
        environ={"TRIREME_RUN_DIR": "run"},
        command=TORCHRUN,
    ).ended()
    assert ended.status == 0, ended.text
    assert len(re.findall(r"^rank 0: error: rank 1 of 2 is gone", ended.err, re.MULTILINE)) == 1
    # Of step 15 perhaps only a part was on the disk, and then that of step 10 is taken.
    assert report(shell, 0)["restored_from"] in (10, 15)
    assert [report(shell, index)["global_step"] for index in range(2)] == [30, 30]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_others_end_soon_and_name_the_rank_that_is_gone(shell: Shell) -> None:
    ended = shell.start(
        *("--nproc-per-node", 2, *TRAIN, "--fault", "1:5:before:kill", "--max-steps", 100000),
        command=TORCHRUN,
    ).ended()
    assert ended.status == 1
    assert len(re.findall(r"^rank 0: error: rank 1 of 2 is gone", ended.err, re.MULTILINE)) == 1
    assert "rank      : 1 (local_rank: 1)" in ended.err  # whom torchrun takes for the first


def slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "node[07]",
    }


def mpi(rank: int) -> dict[str, str]:
    return {
        "PMIX_NAMESPACE": "prterun-4711@1",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }


def tensorflow(kind: str, index: int, **hosts: list[int]) -> dict[str, str]:
    cluster = {name: [f"127.0.0.1:{port}" for port in ports] for name, ports in hosts.items()}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.thorough
def test_processes_that_others_start_train_together(shell: Shell) -> None:
    (port,) = free_ports(1)
    given = {"MASTER_PORT": str(port), "TRIREME_RUN_DIR": "run"}
    chief, other = start_all(shell, [slurm(rank) | given for rank in range(2)], *TRAIN)
    assert (chief.status, other.status) == (0, 0), chief.text + other.text
    assert "step 40 " in chief.out
    assert other.out == ""  # one of them speaks, saves and records
    state = shell.directory / "run/checkpoints/step-000000040-writer-1/state.json"
    assert json.loads(state.read_text())["state"]["workers"] == 2


@pytest.mark.thorough
def test_tf_config_with_servers_is_a_job_with_servers(shell: Shell) -> None:
    ports = free_ports(3)
    hosts = {"ps": ports[:1], "chief": ports[1:2], "worker": ports[2:]}
    environs = [tensorflow(kind, 0, **hosts) for kind in ("ps", "chief", "worker")]
    environs = [environ | {"TRIREME_STRATEGY": "sync"} for environ in environs]
    server, chief, worker = start_all(shell, environs, *TRAIN)
    assert (server.status, chief.status, worker.status) == (0, 0, 0), server.text + chief.text
    assert f"ps:0 listens on tcp://127.0.0.1:{ports[0]}" in server.out
    assert [report(shell, index)["global_step"] for index in range(2)] == [40, 40]


@pytest.mark.thorough
def test_variables_that_make_no_sense_are_one_line_and_status_2(shell: Shell) -> None:
    (ended,) = start_all(shell, [{"WORLD_SIZE": "2"}], *TRAIN)
    assert ended.status == 2, ended.text
    assert ended.err.startswith("error: RANK is not set, and other variables of torchrun's are")
    assert ended.err.count("\n") == 1


@pytest.mark.thorough
def test_a_port_that_is_taken_is_named(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        (ended,) = start_all(shell, [mpi(0) | {"MASTER_PORT": str(port)}], *TRAIN)
    assert ended.status == 1
    assert f"rank 0 cannot listen at 127.0.0.1:{port}" in ended.err
    assert "Traceback" not in ended.text


def test_trireme_task_needs_servers_in_tf_config(shell: Shell) -> None:
    ended = shell.run("task", environ=tensorflow("worker", 0, worker=[1]))
    assert ended.status == 2
    assert "names no parameter server" in ended.err
