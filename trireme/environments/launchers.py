"""Reads the environment variables that torchrun, mpirun, srun and the like set for each process.

Each process is a worker, and all of them hold one model together: these launchers know no
parameter servers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from trireme.cluster.spec import LOOPBACK, is_loopback
from trireme.environments.found import Launched
from trireme.errors import ConfigurationError
from trireme.launch.config.task_config import GroupMember, TaskConfig
from trireme.launch.process_setup.resources import threads_of_task

TORCHRUN, PMI, SLURM, JSRUN = "torchrun", "MPI", "Slurm", "LSF (jsrun)"

FIRST_PORT, PORTS = 12000, 16000
"""The range from which a port is derived for a job without one. It lies below the ports that
systems give to clients."""


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The names of a launcher's variables. Of several with one meaning the first one set counts."""

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: str
    job: tuple[str, ...]  # with the launcher's name for the job


_OMPI = "OMPI_COMM_WORLD_"
_LAUNCHERS = (
    # Inner launchers before outer ones: the last one to start has set variables for this process.
    _Launcher(
        *(TORCHRUN, "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("TORCHELASTIC_RUN_ID",),
    ),
    _Launcher(
        *("Open MPI", f"{_OMPI}RANK", (f"{_OMPI}SIZE",), f"{_OMPI}LOCAL_RANK"),
        *(f"{_OMPI}LOCAL_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    ),
    _Launcher(
        *("Horovod", "HOROVOD_RANK", ("HOROVOD_SIZE",), "HOROVOD_LOCAL_RANK"),
        *("HOROVOD_LOCAL_SIZE", ()),
    ),
    _Launcher(
        *("MVAPICH", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",)),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", ("SLURM_JOB_ID", "PBS_JOBID")),
    ),
    _Launcher(
        *(JSRUN, "JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_SIZE",), "JSM_NAMESPACE_LOCAL_RANK"),
        *("JSM_NAMESPACE_LOCAL_SIZE", ("LSB_JOBID",)),
    ),
    _Launcher(
        *(PMI, "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("SLURM_JOB_ID",))
    ),
    _Launcher(
        *(SLURM, "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")),
        *("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", ("SLURM_JOB_ID", "SLURM_JOBID")),
    ),
)

_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")

_STEP = {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR"}
"""Variables that srun sets and sbatch does not."""


def find_launched_task(environ: Mapping[str, str], only: str | None = None) -> Launched | None:
    """Returns this process as its launcher describes it; None if no known launcher started it.

    The id of the job is empty where the launcher has none.
    """
    variables = {name: value.strip() for name, value in environ.items() if value.strip()}
    for launcher in _LAUNCHERS:
        if only in (None, launcher.name) and _started(launcher, variables):
            return Launched(launcher.name, _Process(launcher, variables).task())
    return None


def _started(launcher: _Launcher, variables: Mapping[str, str]) -> bool:
    if launcher.name == PMI and _set_by_srun(variables):
        return False
    if launcher.name != SLURM:
        return any(name in variables for name in (launcher.rank, *launcher.size))
    # A batch script finds SLURM_PROCID=0 and the job's SLURM_NTASKS too, and is one process.
    in_step = variables.keys() >= {"MASTER_ADDR", "MASTER_PORT"} or variables.keys() & _STEP
    return launcher.rank in variables and (bool(in_step) or variables[launcher.rank] != "0")


def _set_by_srun(variables: Mapping[str, str]) -> bool:
    """Whether srun has set MPI's variables: its own variables say more."""
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return all(
        slurms in variables and variables.get(name) == variables[slurms] for name, slurms in pairs
    )


@dataclass(frozen=True, slots=True)
class _Process:
    """One process of a launcher, and what the variables say of it."""

    launcher: _Launcher
    variables: Mapping[str, str]

    def task(self) -> TaskConfig:
        launcher, variables = self.launcher, self.variables
        slurm = launcher.name == SLURM
        size_name = next((name for name in launcher.size if name in variables), launcher.size[0])
        size = self._number(size_name, least=1)
        rank = self._number(launcher.rank)
        # Kubeflow's PyTorchJob, for one, starts one process a pod, and says nothing of its place.
        meeting = variables.get("MASTER_ADDR", LOOPBACK)
        beside = launcher.name != TORCHRUN or is_loopback(f"{meeting}:0")
        local_rank = self._number(launcher.local_rank, default=rank if beside else 0)
        for name, number in ((launcher.rank, rank), (launcher.local_rank, local_rank)):
            if number >= size:
                raise ConfigurationError(
                    f"{name} is {number} and {size_name} is {size} ({launcher.name}): ranks go "
                    f"from 0 to {size - 1}: set both anew, or unset both to run this process alone"
                )
        local_size = self._local_size(size)
        job = next((variables[name] for name in launcher.job if name in variables), "")
        if slurm and job:
            job = f"{job}.{variables.get('SLURM_STEP_ID', 0)}"
        cores = "SLURM_CPUS_PER_TASK"
        if slurm and cores in variables:
            threads = threads_of_task(variables, 1, self._number(cores, least=1))
        else:
            threads = threads_of_task(variables, local_size)
        if size == 1:
            return TaskConfig(job=job)
        host, port = self._host(size, local_size), self._port(job)
        return TaskConfig(
            job=job,
            index=rank,
            workers=size,
            group=GroupMember(
                size=size,
                rank=rank,
                local_rank=local_rank,
                one_host=local_size == size,
                address=f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}",
                prefix=self._prefix() if launcher.name == TORCHRUN else "",
            ),
            threads=threads,
        )

    def _number(self, name: str, *, least: int = 0, default: int | None = None) -> int:
        text, launcher = self.variables.get(name), self.launcher
        if text is None and default is not None:
            return default
        if text is None:
            raise ConfigurationError(
                f"{name} is not set, and other variables of {launcher.name}'s are: it sets "
                f"{launcher.rank} and {launcher.size[0]} for each process; set what is missing, "
                "or unset them all to run this process alone"
            )
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
            raise ConfigurationError(
                f"{name} is {text[:40]!r} ({launcher.name}): it must be a whole number from "
                f"{least}: start the program with {launcher.name}, or unset its variables"
            )
        return int(text)

    def _local_size(self, size: int) -> int:
        launcher = self.launcher
        if launcher.name != SLURM:
            # mpirun starts all processes on this host unless it says otherwise; torchrun may not.
            default = 1 if launcher.name == TORCHRUN else size
            return min(self._number(launcher.local_size, least=1, default=default), size)
        # Such as 2(x3),1. The first node's number serves to divide the cores.
        found = re.match(r"[0-9]{1,9}", self.variables.get(launcher.local_size, ""))
        count = int(found[0]) if found else (size if self._node()[1] else 1)
        return max(1, min(count, size))

    def _prefix(self) -> str:
        """Returns the prefix of this start's keys in a store that torchrun keeps over restarts."""
        if self.variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return ""
        restart = self.variables.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"trireme/{restart}/{self.variables['WORLD_SIZE']}"

    def _host(self, size: int, local_size: int) -> str:
        launcher, variables = self.launcher, self.variables
        if "MASTER_ADDR" in variables:
            return variables["MASTER_ADDR"]
        if launcher.name == JSRUN and (
            hosts := [*dict.fromkeys(variables.get("LSB_HOSTS", "").split())]
        ):
            return hosts[1] if len(hosts) > 1 else hosts[0]  # the first is that of the batch script
        node, alone = self._node()
        together = local_size == size and launcher.name != SLURM
        if alone or (together and launcher.local_size in variables):
            return LOOPBACK
        if node:
            return node
        if launcher.name == SLURM and "SLURM_LAUNCH_NODE_IPADDR" in variables:
            # The node where srun runs, which is the first node of a batch job.
            return variables["SLURM_LAUNCH_NODE_IPADDR"]
        if together:
            return LOOPBACK
        raise ConfigurationError(
            f"MASTER_ADDR is not set, and {launcher.name} does not say on which host rank 0 of "
            f"{size} is: set MASTER_ADDR to that host, and MASTER_PORT to a free port there, for "
            "every process"
        )

    def _node(self) -> tuple[str, bool]:
        return first_node(next((self.variables[n] for n in _NODELISTS if n in self.variables), ""))

    def _port(self, job: str) -> int:
        text = self.variables.get("MASTER_PORT")
        if text is None:
            return FIRST_PORT + zlib.crc32(job.encode("utf-8", "replace")) % PORTS
        if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
            raise ConfigurationError(
                f"MASTER_PORT is {text[:40]!r}: it must be a port, from 1 to 65535, that is free "
                "on the host of rank 0; or unset it to have one derived from the job's id"
            )
        return int(text)


_NUMBERS = r"\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
_ENTRY = rf"(?:[^\[\],\s]|{_NUMBERS})+"
_NODELIST = re.compile(rf"({_ENTRY})(?:,{_ENTRY})*")


def first_node(text: str) -> tuple[str, bool]:
    """Returns the first host of a list as Slurm writes it, and whether it is the only one.

    Such a list is `node[01-03,7],login`; numbers keep their zeros. "" for any other text.
    """
    found = _NODELIST.fullmatch(text)
    if found is None:
        return "", False
    alone = found[1] == text and not re.search(r"\[[0-9]+[-,]", text)
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found[1]), alone
