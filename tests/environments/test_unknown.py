from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trireme.errors import ConfigurationError
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.environment import detect

SEVERAL = {
    "Kubeflow": {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "job-node-0-0.job",
    },
    "Kubeflow (for torchrun)": {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"},
    "Volcano": {"VC_TASK_INDEX": "1", "VC_WORKER_NUM": "2", "VC_WORKER_HOSTS": "j-0.j,j-1.j"},
    "Volcano started this process (VK_TASK_INDEX=1)": {"VK_TASK_INDEX": "1"},
    "an Indexed Job of Kubernetes": {"JOB_COMPLETION_INDEX": "0"},
    "Flux": {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"},
    "LSF (blaunch)": {"LSB_JOBID": "7", "LSB_HOSTS": "h1 h2", "LSF_PM_TASKID": "2"},
    "PBS (PALS)": {"PBS_JOBID": "7.s", "PBS_NODEFILE": "/x", "PALS_RANKID": "1"},
    "PBS (pbsdsh)": {"PBS_JOBID": "7.s", "PBS_NODEFILE": "/x", "PBS_TASKNUM": "2"},
    "HTCondor": {"_CONDOR_PROCNO": "1", "_CONDOR_NPROCS": "2"},
    "PMIx": {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-h-1@1"},
}

ALONE = [
    {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "0"},
    {"PET_NNODES": "1:1", "PET_NPROC_PER_NODE": "1"},
    {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"},
    {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
    {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1"},
    {"AWS_BATCH_JOB_ID": "x", "AWS_BATCH_JOB_ARRAY_INDEX": "3"},
    {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"},
    {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
    {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "1"},
    {"LSB_JOBID": "7", "LSB_HOSTS": "h1 h1", "LSB_MCPU_HOSTS": "h1 2"},  # a batch script
    {"PBS_JOBID": "7.s", "PBS_NODEFILE": "/x", "PBS_TASKNUM": "1", "PBS_NODENUM": "0"},  # likewise
    {"JOB_ID": "3", "PE_HOSTFILE": "/x", "NHOSTS": "1", "SGE_TASK_ID": "1"},
    {"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "1"},
    {"JOB_COMPLETION_INDEX": "", "SM_HOSTS": " "},  # an empty variable is not set
]


@pytest.mark.parametrize("launcher", SEVERAL)
def test_one_of_several_processes_does_not_train_alone(launcher: str) -> None:
    environ = SEVERAL[launcher]
    with pytest.raises(ConfigurationError) as refused:
        detect(environ)
    text = str(refused.value)
    assert text.startswith(launcher)
    assert "each process would train alone" in text
    _, _, command = text.partition("env ")
    for name in command.removesuffix(" python PROGRAM").split("-u ")[1:]:
        assert f"{name.strip()}={environ[name.strip()][:60]}" in text
        environ = {each: value for each, value in environ.items() if each != name.strip()}
    assert detect(environ).workers == 1  # as the message says


@pytest.mark.parametrize("environ", ALONE)
def test_the_only_process_of_a_launcher_trains(environ: dict[str, str]) -> None:
    assert detect(environ).workers == 1


@pytest.mark.parametrize("environ", SEVERAL.values())
def test_what_says_more_counts(environ: dict[str, str]) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert detect(environ | torchrun).workers == 2
    assert detect(environ | {TASK_VARIABLE: encode_task(TaskConfig(job="j"))}).job == "j"


@pytest.mark.thorough
@pytest.mark.processes
def test_a_program_says_so_in_one_line() -> None:
    program = (
        "import torch, trireme\n"
        "trireme.Session(torch.nn.Linear(1, 1), torch.nn.MSELoss(), torch.optim.Adam)"
    )
    environ = os.environ | {"SM_HOSTS": '["algo-1", "algo-2"]'}
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith('error: SageMaker started this process (SM_HOSTS=["algo-1", ')
    assert ended.stderr.count("\n") == 1
