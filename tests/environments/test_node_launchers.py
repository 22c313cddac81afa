"""The variables of services that start a program on each node, as their pages describe them."""

from __future__ import annotations

import json

import pytest

from trireme.environments.node_launchers import find_node
from trireme.errors import ConfigurationError
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.environment import detect

VERTEX = {
    "cluster": {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222", "b-1:2222"]},
    "task": {"type": "workerpool1", "index": 1},
}
SERVICES: dict[str, tuple[dict[str, str], int, int, str]] = {
    "SageMaker": (
        {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"},
        *(1, 2, "algo-1"),
    ),
    "SkyPilot": (
        {
            "SKYPILOT_NODE_RANK": "2",
            "SKYPILOT_NUM_NODES": "3",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
        },
        *(2, 3, "10.0.0.1"),
    ),
    "AWS Batch": (
        {
            "AWS_BATCH_JOB_NODE_INDEX": "0",
            "AWS_BATCH_JOB_NUM_NODES": "4",
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1",
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
            "AWS_BATCH_JOB_ID": "abc#0",
        },
        *(3, 4, "10.0.0.7"),
    ),
    "AWS Batch, the main node": (
        {
            "AWS_BATCH_JOB_NODE_INDEX": "1",
            "AWS_BATCH_JOB_NUM_NODES": "4",
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1",
            "AWS_BATCH_JOB_ID": "abc#1",
        },
        *(0, 4, "0.0.0.0"),
    ),
    "a LeaderWorkerSet": (
        {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "train-0.train.ns"},
        *(2, 4, "train-0.train.ns"),
    ),
    "Vertex AI": ({"CLUSTER_SPEC": json.dumps(VERTEX)}, *(2, 3, "a-0")),
}


def task(environ: dict[str, str]) -> TaskConfig:
    found = find_node(environ)
    assert found is not None
    assert isinstance(found.task, TaskConfig)
    return found.task


@pytest.mark.parametrize("name", SERVICES)
def test_each_node_is_a_process_of_one_group(name: str) -> None:
    environ, rank, size, first = SERVICES[name]
    found = detect(environ)
    assert (found.index, found.workers, found.servers) == (rank, size, 0)
    assert (found.group.rank, found.group.size, found.group.local_rank) == (rank, size, 0)
    host, _, port = found.group.address.rpartition(":")
    assert host == first
    assert 1024 < int(port) < 32768
    assert found.display == ("none" if rank else "plain")


def test_all_nodes_of_a_job_meet_at_one_port() -> None:
    one, other = (task(SERVICES[n][0]) for n in ("AWS Batch", "AWS Batch, the main node"))
    assert one.job == other.job == "abc"
    assert one.group.address.rpartition(":")[2] == other.group.address.rpartition(":")[2]


def test_what_the_user_sets_comes_first() -> None:
    given = {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "29500"}
    assert task({**SERVICES["SageMaker"][0], **given}).group.address == "[fe80::1]:29500"


@pytest.mark.parametrize("name", SERVICES)
def test_torchrun_on_each_node_says_more(name: str) -> None:
    inner = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    meeting = {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    found = detect({**SERVICES[name][0], **inner, **meeting})
    assert (found.index, found.workers, found.group.local_rank) == (5, 8, 1)


@pytest.mark.parametrize("name", SERVICES)
def test_variables_that_are_missing_are_named(name: str) -> None:
    environ = SERVICES[name][0]
    for left_out in [*environ][1:]:
        if left_out in ("AWS_BATCH_JOB_ID",):
            continue
        with pytest.raises(ConfigurationError, match=f"{left_out}.* is not set"):
            find_node({k: v for k, v in environ.items() if k != left_out})


@pytest.mark.parametrize(
    "environ",
    [
        {"SM_HOSTS": '["algo-1"', "SM_CURRENT_HOST": "algo-1"},
        {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-3"},
        {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"], "workerpool1": []}}'},
        {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "a"},
    ],
)
def test_what_makes_no_sense_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"(SageMaker|Vertex AI|LeaderWorkerSet) s"):
        find_node(environ)
