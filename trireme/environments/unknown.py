"""Launchers of several processes whose variables are known, and say too little to form a job.

Without this check each of their processes would train alone, a copy of its own, and say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trireme.errors import ConfigurationError

_LAUNCHERS = {
    "Kubeflow (for torchrun)": (
        "PET_(NNODES|NPROC_PER_NODE|NODE_RANK)",
        "PET_(NNODES|NPROC_PER_NODE)",
    ),
    "Volcano": (r"V[CK]_TASK_INDEX|VC_\w+_(NUM|HOSTS)", ""),
    "an Indexed Job of Kubernetes": ("JOB_COMPLETION_INDEX", ""),
    "Flux": ("FLUX_TASK_RANK|FLUX_JOB_SIZE", "FLUX_JOB_SIZE"),
    "LSF (blaunch)": ("LSF_PM_TASKID", ""),
    "PBS (PALS)": ("PALS_RANKID", "PMI_SIZE"),
    "PBS (pbsdsh)": ("PBS_TASKNUM", "PBS_TASKNUM"),  # the batch script itself is task 1
    "HTCondor": ("_CONDOR_NPROCS", "_CONDOR_NPROCS"),
    "PMIx": ("PMIX_RANK", ""),
}
"""By launcher patterns of the variables that it sets for each process, and for no script around,
and of those whose largest number says how many processes there are.
"""


def check_no_other_launcher(environ: Mapping[str, str]) -> None:
    """Checks that no launcher that Trireme cannot read started this process among others."""
    variables = {name: value.strip() for name, value in environ.items() if value.strip()}
    for launcher, (pattern, counting) in _LAUNCHERS.items():
        seen = [name for name in sorted(variables) if re.fullmatch(pattern, name)]
        counts = [value for name, value in variables.items() if re.fullmatch(counting, name)]
        if not seen or max(map(int, re.findall("[0-9]{1,9}", " ".join(counts))), default=0) == 1:
            continue
        shown = ", ".join(f"{name}={variables[name][:60]}" for name in seen)
        unset = " ".join(f"-u {name}" for name in seen)
        raise ConfigurationError(
            f"{launcher} started this process ({shown}), and Trireme cannot read from it "
            "which task of which job this is: each process would train alone, a copy of its own. "
            "Start the program with torchrun, mpirun or srun there, set TF_CONFIG, or start each "
            f"task by `trireme task`. If this process shall train alone: env {unset} python PROGRAM"
        )
