"""Launchers of several processes whose variables are known, and say too little to form a job.

Without this check each of their processes would train alone, a copy of its own, and say nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trireme.errors import ConfigurationError

_Variables = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Launcher:
    """What started a process, and what says how many others there are."""

    name: str
    variables: str  # a pattern of those that it sets for each process, and for no script around
    count: Callable[[_Variables], int | None] = lambda variables: None


def _number(name: str) -> Callable[[_Variables], int | None]:
    """Reads a number of processes from a variable; of `2:4` and the like the largest."""

    def count(variables: _Variables) -> int | None:
        numbers = re.findall(r"[0-9]{1,9}", variables.get(name, ""))
        return max(map(int, numbers), default=None)

    return count


def _listed(name: str, key: str = "") -> Callable[[_Variables], int | None]:
    """Counts the hosts that a variable lists in JSON, or the lists under a key of it."""

    def count(variables: _Variables) -> int | None:
        try:
            found = json.loads(variables[name])
            return sum(map(len, found[key].values())) if key else len(found)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    return count


def _torchrun(variables: _Variables) -> int | None:
    nodes = _number("PET_NNODES")(variables)
    # `auto`, the default of Kubeflow, is no number, and one process is what python alone starts.
    return (nodes or 1) * (_number("PET_NPROC_PER_NODE")(variables) or 1)


def _volcano(variables: _Variables) -> int | None:
    numbers = [value for name, value in variables.items() if re.fullmatch(r"VC_\w+_NUM", name)]
    return sum(map(int, numbers)) if numbers and all(map(str.isdecimal, numbers)) else None


_LAUNCHERS = (
    _Launcher("Kubeflow (for torchrun)", r"PET_(NNODES|NPROC_PER_NODE|NODE_RANK)", _torchrun),
    _Launcher("a LeaderWorkerSet", r"LWS_(GROUP_SIZE|WORKER_INDEX)", _number("LWS_GROUP_SIZE")),
    _Launcher("Volcano", r"V[CK]_TASK_INDEX|VC_\w+_(NUM|HOSTS)", _volcano),
    _Launcher("an Indexed Job of Kubernetes", "JOB_COMPLETION_INDEX"),
    _Launcher("SageMaker", "SM_HOSTS", _listed("SM_HOSTS")),
    _Launcher("Vertex AI", "CLUSTER_SPEC", _listed("CLUSTER_SPEC", "cluster")),
    _Launcher(
        "SkyPilot", r"SKYPILOT_(NUM_NODES|NODE_RANK|NODE_IPS)", _number("SKYPILOT_NUM_NODES")
    ),
    _Launcher(
        "AWS Batch",
        r"AWS_BATCH_JOB_(NUM_NODES|NODE_INDEX)",
        _number("AWS_BATCH_JOB_NUM_NODES"),
    ),
    _Launcher("Horovod", r"HOROVOD_(RANK|SIZE)", _number("HOROVOD_SIZE")),
    _Launcher("Flux", r"FLUX_TASK_RANK|FLUX_JOB_SIZE", _number("FLUX_JOB_SIZE")),
    _Launcher("MVAPICH", r"MV2_COMM_WORLD_(RANK|SIZE)", _number("MV2_COMM_WORLD_SIZE")),
    _Launcher("LSF (jsrun)", r"JSM_NAMESPACE_(RANK|SIZE)", _number("JSM_NAMESPACE_SIZE")),
    _Launcher("LSF (blaunch)", "LSF_PM_TASKID"),
    _Launcher("PBS (PALS)", "PALS_RANKID", _number("PMI_SIZE")),
    # The batch script itself is task 1.
    _Launcher(
        "PBS (pbsdsh)", "PBS_TASKNUM", lambda seen: 1 if seen["PBS_TASKNUM"] == "1" else None
    ),
    _Launcher("HTCondor", r"_CONDOR_NPROCS", _number("_CONDOR_NPROCS")),
    _Launcher("PMIx", "PMIX_RANK"),
)


def check_no_other_launcher(environ: Mapping[str, str]) -> None:
    """Checks that no launcher that Trireme cannot read started this process among others."""
    variables = {name: value.strip() for name, value in environ.items() if value.strip()}
    for launcher in _LAUNCHERS:
        seen = [name for name in sorted(variables) if re.fullmatch(launcher.variables, name)]
        if not seen or launcher.count(variables) == 1:
            continue
        shown = ", ".join(f"{name}={variables[name][:60]}" for name in seen)
        unset = " ".join(f"-u {name}" for name in seen)
        raise ConfigurationError(
            f"{launcher.name} started this process ({shown}), and Trireme cannot read from it "
            "which task of which job this is: each process would train alone, a copy of its own. "
            "Start the program with torchrun, mpirun or srun there, set TF_CONFIG, or start each "
            f"task by `trireme task`. If this process shall train alone: env {unset} python PROGRAM"
        )
