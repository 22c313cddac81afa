"""What torchrun, MPI's mpirun and Slurm's srun say in the environment of each process they start.

Pure: from the variables to this process's place among the others. Each process is a worker, and
all of them hold one model together: these launchers know no parameter servers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from trireme.errors import ConfigurationError
from trireme.launch.command import LOOPBACK
from trireme.launch.nodelist import expand

__all__ = ["MARKS", "RANKS", "TORCHRUN", "Place", "find_place"]

TORCHRUN = "torchrun"
SLURM = "Slurm"
PMI = "MPI"

FIRST_PORT, PORTS = 12000, 16000
"""Of these ports one is derived for a job that has none: below what systems give to clients."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process stands among those that were started with it.

    Attributes:
        launcher: who started them.
        rank: which of them this is, from 0.
        size: how many there are.
        local_rank: which of those on this host.
        local_size: how many on this host, as far as the launcher says; at least 1.
        address: `host:port` at which they find each other; empty for one process.
        prefix: of their keys there, where the launcher serves the store; empty where rank 0 does.
        job: the launcher's name for the job; empty where it has none.
        cores: how many this process may use, where the launcher says so.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str = ""
    prefix: str = ""
    job: str = ""
    cores: int | None = None


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The names of one launcher's variables; of several that say the same, the first that is set.

    Attributes:
        name: the launcher's.
        rank, size, local_rank, local_size: what each process has of its own.
        job: what the launcher calls the job.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: str
    job: tuple[str, ...]


_LAUNCHERS = (
    # Inner before outer: whoever is started last has set what it says for this very process.
    _Launcher(
        TORCHRUN,
        "RANK",
        ("WORLD_SIZE",),
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        ("TORCHELASTIC_RUN_ID",),
    ),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher(
        PMI, "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("SLURM_JOB_ID",)
    ),
    _Launcher(
        SLURM,
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_JOBID"),
    ),
)

RANKS = tuple(launcher.rank for launcher in _LAUNCHERS)
"""The variables that number processes."""

MARKS = tuple(name for launcher in _LAUNCHERS for name in (launcher.rank, *launcher.size))
"""Where none of these is set, no launcher has started this process."""

_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")

_STEP = (
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_LAUNCH_NODE_IPADDR",
)
"""What srun sets and sbatch does not."""


def find_place(environ: Mapping[str, str], only: str | None = None) -> Place | None:
    """Returns the place of this process, or None where no launcher is known to have started it.

    Args:
        environ: the environment; an empty variable is none.
        only: look for this launcher alone.

    Raises:
        ConfigurationError: the variables are not all there, or contradict each other.
    """
    said = {name: value for name, value in environ.items() if value.strip()}
    for launcher in _LAUNCHERS:
        if only in (None, launcher.name) and _started(launcher, said):
            return _place(launcher, said)
    return None


def _started(launcher: _Launcher, said: Mapping[str, str]) -> bool:
    if launcher.name == PMI and _is_slurms_own(said):
        return False
    if launcher.name != SLURM:
        return any(name in said for name in (launcher.rank, *launcher.size))
    # A batch script finds SLURM_PROCID=0 and the job's SLURM_NTASKS too, and is one process.
    meeting = "MASTER_ADDR" in said and "MASTER_PORT" in said
    in_step = meeting or any(name in said for name in _STEP)
    return launcher.rank in said and (in_step or said[launcher.rank].strip() != "0")


def _is_slurms_own(said: Mapping[str, str]) -> bool:
    """Whether it is srun that speaks MPI's protocol, and says more by its own variables."""
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return all(slurms in said and said.get(name) == said[slurms] for name, slurms in pairs)


def _place(launcher: _Launcher, said: Mapping[str, str]) -> Place:
    size_name = next((name for name in launcher.size if name in said), launcher.size[0])
    size = _number(launcher, said, size_name, least=1)
    rank = _number(launcher, said, launcher.rank)
    if rank >= size:
        raise ConfigurationError(
            f"{launcher.rank} is {rank} and {size_name} is {size} ({launcher.name}): ranks go from "
            f"0 to {size - 1}: set both anew, or unset both to run this process alone"
        )
    local_rank = _number(launcher, said, launcher.local_rank, default=rank)
    local_size = _local_size(launcher, said, size)
    if local_rank >= size:
        raise ConfigurationError(
            f"{launcher.local_rank} is {local_rank} and {size_name} is {size} ({launcher.name}): "
            "no host has more processes than there are: set both anew, or unset them"
        )
    job = next((said[name] for name in launcher.job if name in said), "")
    if launcher.name == SLURM and job:
        job = f"{job}.{said.get('SLURM_STEP_ID', 0)}"
    return Place(
        launcher=launcher.name,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=_address(launcher, said, size, local_size, job) if size > 1 else "",
        prefix=_prefix(said) if launcher.name == TORCHRUN and size > 1 else "",
        job=job,
        cores=_cores(launcher, said),
    )


def _number(
    launcher: _Launcher,
    said: Mapping[str, str],
    name: str,
    *,
    least: int = 0,
    default: int | None = None,
) -> int:
    text = said.get(name, "").strip()
    if not text and default is not None:
        return default
    if not text:
        raise ConfigurationError(
            f"{name} is not set, and other variables of {launcher.name}'s are: it sets "
            f"{launcher.rank} and {launcher.size[0]} for each process; set what is missing, or "
            "unset them all to run this process alone"
        )
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise ConfigurationError(
            f"{name} is {text[:40]!r} ({launcher.name}): it must be a whole number from {least}: "
            f"start the program with {launcher.name}, or unset its variables"
        )
    return int(text)


def _local_size(launcher: _Launcher, said: Mapping[str, str], size: int) -> int:
    if launcher.name != SLURM:
        # mpirun starts all of them here unless it says otherwise; of others nobody knows.
        default = 1 if launcher.name == TORCHRUN else size
        return min(_number(launcher, said, launcher.local_size, least=1, default=default), size)
    # Such as 2(x3),1: the first node is as good as any to divide cores by.
    found = re.match(r"[0-9]{1,9}", said.get(launcher.local_size, ""))
    count = int(found[0]) if found else (size if len(_nodes(said)) == 1 else 1)
    return max(1, min(count, size))


def _cores(launcher: _Launcher, said: Mapping[str, str]) -> int | None:
    if launcher.name != SLURM or "SLURM_CPUS_PER_TASK" not in said:
        return None
    return _number(launcher, said, "SLURM_CPUS_PER_TASK", least=1)


def _prefix(said: Mapping[str, str]) -> str:
    """Returns what sets this start apart in a store that torchrun keeps over restarts."""
    if said.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return f"trireme/{said.get('TORCHELASTIC_RESTART_COUNT', '0')}/{said['WORLD_SIZE'].strip()}"


# Where they meet ---------------------------------------------------------------------------------


def _address(
    launcher: _Launcher, said: Mapping[str, str], size: int, local_size: int, job: str
) -> str:
    host = said.get("MASTER_ADDR", "").strip() or _host(launcher, said, size, local_size)
    if re.search(r"[\s/]", host):
        raise ConfigurationError(
            f"MASTER_ADDR is {host!r}: it must be the name or the address of rank 0's host"
        )
    port = _port(said, job)
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def _host(launcher: _Launcher, said: Mapping[str, str], size: int, local_size: int) -> str:
    """Returns rank 0's host where nobody has named it."""
    nodes, together = _nodes(said), local_size == size and launcher.name != SLURM
    if len(nodes) == 1 or (together and launcher.local_size in said):
        return LOOPBACK
    if nodes:
        return nodes[0]
    if launcher.name == SLURM and "SLURM_LAUNCH_NODE_IPADDR" in said:
        # Where srun runs: of a batch job, that is its first node.
        return said["SLURM_LAUNCH_NODE_IPADDR"].strip()
    if together:
        return LOOPBACK
    raise ConfigurationError(
        f"MASTER_ADDR is not set, and {launcher.name} does not say on which host rank 0 of "
        f"{size} is: set MASTER_ADDR to that host, and MASTER_PORT to a free port there, for every "
        "process"
    )


def _nodes(said: Mapping[str, str]) -> list[str]:
    name = next((name for name in _NODELISTS if name in said), "")
    if not name:
        return []
    try:
        return expand(said[name].strip())
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{name}: {error}: set MASTER_ADDR to the host of rank 0, and unset {name}"
        ) from error


def _port(said: Mapping[str, str], job: str) -> int:
    text = said.get("MASTER_PORT", "").strip()
    if not text:
        return FIRST_PORT + zlib.crc32(job.encode("utf-8", "replace")) % PORTS
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise ConfigurationError(
            f"MASTER_PORT is {text[:40]!r}: it must be a port, from 1 to 65535, that is free on "
            "the host of rank 0; or unset it to have one derived from the job's id"
        )
    return int(text)
