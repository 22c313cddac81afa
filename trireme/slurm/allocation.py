"""What Slurm's variables say of the allocation of a job: its nodes, and what each has. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trireme.agents.resources import Resources
from trireme.errors import ConfigurationError

_COUNTS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_OUT = re.compile(r"down|drain|drng|fail|maint|reboot|unk|\*")
"""What is in the state of a node on which no step starts; `*` is behind that of a silent one."""


@dataclass(frozen=True, slots=True)
class Group:
    """A part of the allocation: all of it, or a component of a heterogeneous job."""

    number: int | None  # of the component; None where the job has none
    nodes: Mapping[str, Resources]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation of a job.

    In a heterogeneous job servers are in its first component, and workers in its second one.
    """

    job: str
    servers: Group
    workers: Group

    def group(self, task: str) -> Group:
        """Returns where a task belongs."""
        return self.servers if task.startswith("ps:") else self.workers


def read_allocation(
    environ: Mapping[str, str], expand: Callable[[str], Sequence[str]]
) -> Allocation:
    """Returns the allocation that the variables of `salloc` or a batch script describe.

    `expand` returns the names of a list of nodes such as `n[1-4]`.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        raise ConfigurationError(
            "--on slurm starts tasks in an allocation, and SLURM_JOB_ID is not set: start "
            "`trireme run` in a batch script (sbatch), or in `salloc --nodes N`"
        )
    components = int(environ.get("SLURM_HET_SIZE") or 0)
    if components > 2:
        raise ConfigurationError(
            f"the heterogeneous job has {components} components: give one for the servers, and "
            "then one for the workers"
        )
    if components < 2:
        every = _group(environ, "", None, expand)
        return Allocation(job, every, every)
    first, second = (_group(environ, f"_HET_GROUP_{n}", n, expand) for n in range(2))
    return Allocation(job, first, second)


def _group(
    environ: Mapping[str, str],
    suffix: str,
    number: int | None,
    expand: Callable[[str], Sequence[str]],
) -> Group:
    names = expand(_value(environ, f"SLURM_JOB_NODELIST{suffix}"))
    counts: list[float] = []
    for count, times in _COUNTS.findall(_value(environ, f"SLURM_JOB_CPUS_PER_NODE{suffix}")):
        counts += [float(count)] * int(times or 1)
    if len(counts) != len(names):
        raise ConfigurationError(
            f"SLURM_JOB_CPUS_PER_NODE{suffix} is of {len(counts)} nodes, and there are "
            f"{len(names)}: start `trireme run` in a batch script, or in `salloc`"
        )
    gpus = _gpus(environ, suffix)
    return Group(
        number,
        {
            name: {"CPU": count, **({"GPU": gpus} if gpus else {})}
            for name, count in zip(names, counts, strict=True)
        },
    )


def _value(environ: Mapping[str, str], name: str) -> str:
    if value := environ.get(name, ""):
        return value
    raise ConfigurationError(
        f"{name} is not set, and SLURM_JOB_ID is: Slurm sets both in a batch script and in "
        "`salloc`; start `trireme run` there, with its variables"
    )


def _gpus(environ: Mapping[str, str], suffix: str) -> float:
    """Returns the GPUs of each node, of which all have as many; such as 4, or `h100:4`."""
    names = (f"SLURM_GPUS_PER_NODE{suffix}", f"SLURM_GPUS_ON_NODE{suffix}")
    text = next((environ[name] for name in names if environ.get(name)), "0")
    last = text.rpartition(":")[2]
    return float(last) if last.isdecimal() else 0.0


def usable(states: Mapping[str, str]) -> set[str]:
    """Returns the nodes on which steps can start, by their states as `sinfo` tells them."""
    return {name for name, state in states.items() if not _OUT.search(state)}
