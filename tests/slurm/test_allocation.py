from __future__ import annotations

from collections.abc import Sequence

import pytest

from trireme.errors import ConfigurationError
from trireme.slurm.allocation import read_allocation, usable

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a1,a2,a3", "SLURM_JOB_CPUS_PER_NODE": "4(x2),2"}


def expand(nodes: str) -> Sequence[str]:
    return nodes.split(",")


def test_each_node_has_its_cores() -> None:
    found = read_allocation(JOB, expand)
    assert found.job == "7"
    assert found.servers == found.workers == found.group("ps:0")
    assert found.workers.number is None
    assert found.workers.nodes == {"a1": {"CPU": 4}, "a2": {"CPU": 4}, "a3": {"CPU": 2}}


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SLURM_GPUS_PER_NODE": "h100:4", "SLURM_GPUS_ON_NODE": "2"}, 4),
        ({"SLURM_GPUS_ON_NODE": "2"}, 2),
        ({"SLURM_GPUS_PER_NODE": "odd:"}, None),
    ],
)
def test_all_nodes_have_as_many_gpus(variables: dict[str, str], gpus: int | None) -> None:
    nodes = read_allocation({**JOB, **variables}, expand).workers.nodes
    assert [has.get("GPU") for has in nodes.values()] == [gpus] * 3


def heterogeneous(components: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_HET_SIZE": str(components),
        "SLURM_JOB_NODELIST_HET_GROUP_0": "s1",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "w1,w2",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "8(x2)",
        "SLURM_GPUS_PER_NODE_HET_GROUP_1": "4",
    }


def test_the_components_of_a_heterogeneous_job_are_of_servers_and_workers() -> None:
    found = read_allocation(heterogeneous(2), expand)
    assert found.group("ps:1").number == 0
    assert found.group("ps:1").nodes == {"s1": {"CPU": 1}}
    assert found.group("worker:0").number == 1
    assert found.group("worker:0").nodes["w2"] == {"CPU": 8, "GPU": 4}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "SLURM_JOB_ID is not set.*sbatch"),
        ({"SLURM_JOB_ID": "7"}, "SLURM_JOB_NODELIST is not set"),
        ({**JOB, "SLURM_JOB_CPUS_PER_NODE": "4"}, "is of 1 nodes, and there are 3"),
        (heterogeneous(3), "3 components"),
    ],
)
def test_what_is_no_allocation_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_allocation(environ, expand)


def test_nodes_that_are_down_or_silent_start_nothing() -> None:
    states = {"a": "mixed", "b": "allocated", "c": "down", "d": "mixed*", "e": "draining", "f": ""}
    assert usable(states) == {"a", "b", "f"}
