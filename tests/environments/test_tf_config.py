from __future__ import annotations

import json

import pytest

from trireme.environments.cluster import ClusterSpec, ClusterTask
from trireme.environments.tf_config import read_tf_config
from trireme.errors import ConfigurationError

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def config(cluster: object, kind: object = "worker", index: object = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def test_the_chief_is_the_first_worker() -> None:
    cluster = ClusterSpec(ps=("d:1",), worker=("a:1", "b:1", "c:1"))
    assert read_tf_config(config(CLUSTER, "chief")) == ClusterTask("worker", 0, cluster)
    assert read_tf_config(config(CLUSTER, "worker", "1")) == ClusterTask("worker", 2, cluster)
    assert read_tf_config(config(CLUSTER, "ps")) == ClusterTask("ps", 0, cluster)


@pytest.mark.parametrize("text", ["{}", '{"environment": "cloud"}', config({}), config({"ps": []})])
def test_no_cluster_is_no_task(text: str) -> None:
    assert read_tf_config(text) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[]", r"cannot be read.*array"),
        ('"\udc80"', "cannot be read"),
        (config({"worker": "a:1"}), r"cannot be read.*cluster"),
        (config(CLUSTER, "worker", "x"), r"cannot be read.*task.index"),
        (json.dumps({"cluster": CLUSTER}), "has a cluster and no task"),
        (config(CLUSTER, "gpu"), "type 'gpu'.*chief, master, worker, ps"),
        (config({**CLUSTER, "workers": ["x:1"]}), r"'workers' \(did you mean worker\?\)"),
        (config(CLUSTER, "evaluator"), "evaluator: leave it out"),
        (config(CLUSTER, "worker", 2), "worker:3 is outside the cluster"),
        (config(CLUSTER, "worker", -1), "task worker -1"),
        (config(CLUSTER, "chief", 1), "there is one chief"),
        (config({"worker": ["a:1"]}, "chief"), "task chief and none such"),
        (config({"worker": ["a:1"]}, "ps"), "no ps at all"),
        (config({"ps": ["a:1"]}, "ps"), "the cluster has no worker"),
        (config({**CLUSTER, "master": ["z:1"]}), "has 2 chiefs"),
        (config({"worker": ["a:1", "a:1"]}), "both have the address a:1"),
        (config({"worker": ["a"]}), "write host:port"),
        (config({"worker": [""]}), "write host:port"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"TF_CONFIG .*{message}.*or unset it"):
        read_tf_config(text)
