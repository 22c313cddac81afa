from __future__ import annotations

import os

import pytest

from trireme.environments.launchers import FIRST_PORT, PORTS, find_launched_task
from trireme.errors import ConfigurationError
from trireme.launch.config.task_config import TaskConfig

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


CORES = len(os.sched_getaffinity(0))


def found(environ: dict[str, str]) -> TaskConfig:
    launched = find_launched_task(environ)
    assert launched is not None
    assert isinstance(launched.task, TaskConfig)
    return launched.task


def launcher(environ: dict[str, str]) -> str:
    launched = find_launched_task(environ)
    assert launched is not None
    return launched.by


def test_slurm_s_tasks_meet_on_the_first_node_at_a_port_of_the_job() -> None:
    process = found(STEP)
    assert (process.group.rank, process.workers, process.group.local_rank) == (3, 4, 1)
    assert (process.group.one_host, process.threads) == (False, max(1, CORES // 2))
    host, _, port = process.group.address.rpartition(":")
    assert host == "node01"
    assert FIRST_PORT <= int(port) < FIRST_PORT + PORTS
    assert found(STEP | {"SLURM_STEP_ID": "2"}).group.address != process.group.address


def test_slurm_s_tasks_of_one_node_meet_at_loopback() -> None:
    assert found(STEP | {"SLURM_STEP_NODELIST": "node07"}).group.address.startswith("127.0.0.1:")


def test_what_the_user_says_of_the_meeting_counts() -> None:
    environ = STEP | {"MASTER_ADDR": "head", "MASTER_PORT": "4000"}
    assert found(environ).group.address == "head:4000"
    assert found(STEP | {"MASTER_PORT": "4000"}).group.address == "node01:4000"
    assert (
        found(STEP | {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "1"}).group.address == "[fe80::1]:1"
    )


def test_without_a_list_of_nodes_srun_s_own_is_taken() -> None:
    environ = {k: v for k, v in STEP.items() if k != "SLURM_STEP_NODELIST"}
    assert found(environ | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}).group.address.startswith(
        "10.0.0.9:"
    )
    with pytest.raises(ConfigurationError, match="MASTER_ADDR is not set, and Slurm"):
        find_launched_task(environ)


def test_a_batch_script_is_one_process() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert find_launched_task(batch | {"SLURM_JOB_NODELIST": "node[1-8]"}) is None
    assert found(batch | {"SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "node[1-8]"}).workers == 8


def test_slurm_s_cores_of_a_task() -> None:
    assert found(STEP | {"SLURM_CPUS_PER_TASK": "6"}).threads == 6


def test_mpirun_s_processes_on_one_host_meet_at_loopback() -> None:
    process = found(MPI)
    assert (process.group.rank, process.workers, process.group.local_rank) == (1, 2, 1)
    assert (process.group.one_host, process.threads) == (True, max(1, CORES // 2))
    assert process.group.address.startswith("127.0.0.1:")
    assert found(MPI | {"PMIX_NAMESPACE": "1"}).group.address != process.group.address


@pytest.mark.parametrize(
    ("name", "prefix"), [("Horovod", "HOROVOD_"), ("MVAPICH", "MV2_COMM_WORLD_")]
)
def test_launchers_of_their_own_family_are_as_mpirun(name: str, prefix: str) -> None:
    words = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    environ = {prefix + word: value for word, value in words.items()}
    assert launcher(environ) == name
    process = found(environ)
    assert (process.group.rank, process.workers, process.group.local_rank) == (1, 2, 1)
    apart = environ | {f"{prefix}LOCAL_RANK": "0", f"{prefix}LOCAL_SIZE": "1"}
    with pytest.raises(ConfigurationError, match=f"MASTER_ADDR is not set, and {name}"):
        find_launched_task(apart)
    assert found(apart | {"MASTER_ADDR": "h"}).group.address.startswith("h:")


def test_jsrun_s_processes_meet_on_the_first_host_behind_that_of_the_batch_script() -> None:
    environ = {
        "LSB_JOBID": "7",
        "LSB_HOSTS": "batch h1 h1 h2 h2",
        "JSM_NAMESPACE_RANK": "3",
        "JSM_NAMESPACE_SIZE": "4",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "2",
    }
    process = found(environ)
    assert (process.group.rank, process.workers, process.group.local_rank) == (3, 4, 1)
    assert process.group.address.startswith("h1:")
    assert found(environ | {"LSB_HOSTS": "h3 h3"}).group.address.startswith("h3:")


def test_one_process_of_each_pod_has_the_first_device() -> None:
    """As Kubeflow's PyTorchJob starts them, which says nothing of a place on a host."""
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    assert found(pod).group.local_rank == 0
    assert found(pod | {"MASTER_ADDR": "localhost"}).group.local_rank == 1


def test_mpirun_s_processes_on_several_hosts_have_to_be_told() -> None:
    with pytest.raises(ConfigurationError, match="MASTER_ADDR is not set, and Open MPI"):
        find_launched_task(MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_mpirun_in_a_slurm_job_counts_its_own() -> None:
    daemon = STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert found(daemon | MPI).workers == 2
    assert launcher(daemon | {"PMI_RANK": "1", "PMI_SIZE": "2"}) == "MPI"


def test_srun_that_speaks_pmi_is_srun() -> None:
    assert launcher(STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}) == "Slurm"


def test_only_torchrun_serves_the_store_itself() -> None:
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert found(by_hand).group.prefix == ""
    agent = by_hand | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert found(agent).group.prefix == "trireme/2/2"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set.*RANK and WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2.*0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1'.*whole number from 0"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'.*whole number from 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "5"}, "LOCAL_RANK is 5 and WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"SLURM_PROCID": "4", "SLURM_NTASKS": "4"}, "SLURM_PROCID is 4 and SLURM_NTASKS is 4"),
        (STEP | {"SLURM_STEP_NODELIST": "n["}, "MASTER_ADDR is not set, and Slurm does not say"),
    ],
)
def test_what_is_wrong_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_launched_task(environ)
