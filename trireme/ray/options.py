"""The engine `ray`, as its entry point declares it, and its options."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from trireme.agents.resources import check_cluster
from trireme.job_config import Gpus, Option, Positive
from trireme.launch.engines import EngineType


def _whole_or_share(gpus: float) -> None:
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(gpus)


class RayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `--on ray`."""

    # fmt: off
    address: Annotated[str, Option("ADDRESS",
        "ray: the cluster's head, host:port; auto: the cluster of this host (default auto)"
        )] = "auto"
    cpus_per_worker: Annotated[Positive, Option("C",
        "ray: cores reserved for each worker, which uses as many threads (default 1)")] = 1
    gpus_per_worker: Annotated[Gpus, Option("G",
        "ray: GPUs reserved for each worker, which sees no others (default 0)",
        expects="a whole number from 0, or a share of one GPU", check=_whole_or_share)] = 0.0
    pack_workers: Annotated[bool, Option("",
        "ray: place workers on as few nodes as possible, not on as many")] = False
    # fmt: on


_check = partial(check_cluster, of="a Ray cluster")

RAY = EngineType("the nodes of a Ray cluster", "trireme.ray.cluster:run_ray", RayOptions, _check)
