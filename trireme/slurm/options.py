"""The engine `slurm`, as its entry point declares it, and its options."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from trireme.agents.resources import check_cluster
from trireme.job_config import Gpus, Option, Positive
from trireme.launch.engines import EngineType


def _whole(gpus: float) -> None:
    if gpus != int(gpus):
        raise ValueError(gpus)


class SlurmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `--on slurm`."""

    # fmt: off
    cpus_per_worker: Annotated[Positive, Option("C",
        "slurm: cores of the allocation for each worker, which uses as many threads (default 1)"
        )] = 1
    gpus_per_worker: Annotated[Gpus, Option("G",
        "slurm: GPUs of the allocation for each worker, which sees no others (default 0)",
        expects="a whole number from 0", check=_whole)] = 0.0
    pack_workers: Annotated[bool, Option("",
        "slurm: place workers on as few nodes as possible, not on as many")] = False
    # fmt: on


_check = partial(check_cluster, of="the allocation")

SLURM = EngineType(
    "the nodes of a Slurm allocation", "trireme.slurm.pool:run_slurm", SlurmOptions, _check
)
