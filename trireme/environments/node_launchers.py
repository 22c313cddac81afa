"""Reads the variables of services that start a program once on each node of a cluster.

All processes together hold one model, as under torchrun with one process a node. Rank 0 is the
first node, where the others meet it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trireme.environments.found import Launched
from trireme.environments.launchers import FIRST_PORT, PORTS
from trireme.errors import ConfigurationError
from trireme.launch.config.task_config import GroupMember, TaskConfig
from trireme.launch.process_setup.resources import threads_of_task

_ANYWHERE = "0.0.0.0"  # where the first node listens which a service does not tell its own address


class _Node(NamedTuple):
    """What a service says of a node."""

    rank: int
    size: int
    first: str  # the address of the first node
    job: str  # the service's name for the job


def _sagemaker(variables: Mapping[str, str]) -> _Node:
    hosts = json.loads(variables["SM_HOSTS"])
    rank = hosts.index(variables["SM_CURRENT_HOST"])
    return _Node(rank, len(hosts), hosts[0], variables.get("TRAINING_JOB_NAME", ""))


def _skypilot(variables: Mapping[str, str]) -> _Node:
    addresses = variables["SKYPILOT_NODE_IPS"].split()
    rank, size = int(variables["SKYPILOT_NODE_RANK"]), int(variables["SKYPILOT_NUM_NODES"])
    return _Node(rank, size, addresses[0], variables.get("SKYPILOT_TASK_ID", ""))


def _aws_batch(variables: Mapping[str, str]) -> _Node:
    prefix = "AWS_BATCH_JOB_"
    index, size, main = (
        int(variables[f"{prefix}{each}"]) for each in ("NODE_INDEX", "NUM_NODES", "MAIN_NODE_INDEX")
    )
    # The main node has rank 0, whichever it is, and is not told its own address.
    rank = (index - main) % size
    first = variables[f"{prefix}MAIN_NODE_PRIVATE_IPV4_ADDRESS"] if rank else _ANYWHERE
    return _Node(rank, size, first, variables.get(f"{prefix}ID", "").partition("#")[0])


def _leader_worker_set(variables: Mapping[str, str]) -> _Node:
    rank, size = int(variables["LWS_WORKER_INDEX"]), int(variables["LWS_GROUP_SIZE"])
    leader = variables["LWS_LEADER_ADDRESS"] if size > 1 else ""
    return _Node(rank, size, leader, leader)


def _vertex(variables: Mapping[str, str]) -> _Node:
    described: Any = json.loads(variables["CLUSTER_SPEC"])
    pools, task = described["cluster"], described["task"]
    every = [(pool, n) for pool in sorted(pools) for n in range(len(pools[pool]))]
    rank = every.index((task["type"], int(task["index"])))
    first = pools[every[0][0]][0].rpartition(":")[0]
    return _Node(rank, len(every), first, variables.get("CLOUD_ML_JOB_ID", first))


_SERVICES: Mapping[str, tuple[str, Callable[[Mapping[str, str]], _Node]]] = {
    "SageMaker": ("SM_HOSTS", _sagemaker),
    "SkyPilot": ("SKYPILOT_NODE_RANK", _skypilot),
    "AWS Batch": ("AWS_BATCH_JOB_NODE_INDEX", _aws_batch),
    "a LeaderWorkerSet": ("LWS_GROUP_SIZE", _leader_worker_set),
    "Vertex AI": ("CLUSTER_SPEC", _vertex),
}
"""By service a variable that it alone sets, and what reads all of them."""


def find_node(environ: Mapping[str, str]) -> Launched | None:
    """Returns this process as a service describes it; None where none started it, or it alone."""
    variables = {name: value.strip() for name, value in environ.items() if value.strip()}
    for service, (known, read) in _SERVICES.items():
        if known not in variables:
            continue
        try:
            node = read(variables)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            missing = f"{error} is not set" if isinstance(error, KeyError) else f"{error}"
            raise ConfigurationError(
                f"{service} started this process ({known}={variables[known][:60]}), and its "
                f"variables cannot be read: {missing}. Set MASTER_ADDR, RANK and WORLD_SIZE as "
                f"torchrun does, or unset {known} to train alone"
            ) from error
        return None if node.size == 1 else Launched(service, _task(service, node, variables))
    return None


def _task(service: str, node: _Node, variables: Mapping[str, str]) -> TaskConfig:
    if not 0 <= node.rank < node.size:
        raise ConfigurationError(
            f"{service} says that this is node {node.rank} of {node.size}: numbers go from 0"
        )
    port = FIRST_PORT + zlib.crc32(node.job.encode("utf-8", "replace")) % PORTS
    first = variables.get("MASTER_ADDR", node.first)
    if re.fullmatch(r"[0-9]{1,5}", given := variables.get("MASTER_PORT", "")):
        port = int(given)
    return TaskConfig(
        job=node.job,
        index=node.rank,
        workers=node.size,
        group=GroupMember(
            size=node.size,
            rank=node.rank,
            local_rank=0,
            one_host=False,
            address=f"[{first}]:{port}" if ":" in first else f"{first}:{port}",
        ),
        threads=threads_of_task(variables, 1),
    )
