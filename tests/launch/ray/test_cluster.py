from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.launcher import tasks_of_job
from trireme.launch.ray.agent import NodeFacts
from trireme.launch.ray.cluster import listen_hosts, plan

HERE = NodeFacts(node="n1", address="10.0.0.1", host="kernel/1", version="1.0")
THERE = NodeFacts(node="n2", address="10.0.0.2", host="kernel/2", version="1.0")


@given(
    servers=st.integers(0, 5),
    workers=st.integers(1, 9),
    cpus=st.integers(1, 4),
    gpus=st.sampled_from([0.0, 0.5, 2.0]),
    pack=st.booleans(),
    processes=st.integers(1, 3),
)
def test_every_task_has_a_seat_of_its_own_and_the_coordinator_sits_with_the_first_server(
    servers: int, workers: int, cpus: int, gpus: float, pack: bool, processes: int
) -> None:
    config = JobConfig(ray_cpus_per_worker=cpus, ray_gpus_per_worker=gpus, ray_pack_workers=pack)
    # Without servers all processes are in one group, each a worker.
    counts = (workers, processes) if servers else (workers * processes, workers * processes)
    task = TaskConfig(
        job="j", workers=counts[0], servers=servers, processes=counts[1], config=config
    )
    groups, placements = plan(task)
    names = [each.name for each in tasks_of_job(task) if each.role != "coordinator"]
    assert names[:servers] == [f"ps:{i}" for i in range(servers)]
    assert len(names) == servers + workers * processes
    assert list(placements) == (["coordinator:0"] if servers else []) + names
    assert len({placements[name] for name in names}) == len(names)
    if servers:
        assert placements["coordinator:0"] == placements["ps:0"]
    for name, (group, index) in placements.items():
        bundle = groups[group].bundles[index]
        assert bundle["CPU"] >= 1
        assert bundle.get("GPU", 0.0) == (gpus if name.startswith("worker:") else 0.0)
    bundles = groups["workers"].bundles
    assert bundles == (bundles[0],) * workers * processes
    assert bundles[0]["CPU"] == cpus
    assert groups["workers"].strategy == ("PACK" if pack else "SPREAD")


def test_tasks_of_one_host_listen_at_loopback() -> None:
    facts = {"ps:0": HERE, "worker:0": replace(HERE, node="n3", address="10.0.0.3")}
    assert set(listen_hosts(facts, "1.0", allow_plaintext=False).values()) == {"127.0.0.1"}


def test_tasks_of_several_hosts_need_a_word_of_trust() -> None:
    facts = {"ps:0": HERE, "worker:0": replace(THERE, address="fe80::2")}
    with pytest.raises(ConfigurationError, match=r"several hosts \(10.0.0.1, fe80::2\).*plaintext"):
        listen_hosts(facts, "1.0", allow_plaintext=False)
    hosts = listen_hosts(facts, "1.0", allow_plaintext=True)
    assert hosts == {"ps:0": "10.0.0.1", "worker:0": "[fe80::2]"}


def test_a_node_without_the_program_is_named() -> None:
    facts = {"ps:0": HERE, "worker:0": replace(THERE, problem="there is no directory /w")}
    with pytest.raises(ConfigurationError, match=r"worker:0 .* 10.0.0.2 \(n2\): there is no dir"):
        listen_hosts(facts, "1.0", allow_plaintext=True)


def test_a_node_with_another_version_is_named() -> None:
    facts = {"ps:0": HERE, "worker:0": replace(THERE, version="0.9")}
    with pytest.raises(ConfigurationError, match=r"10.0.0.2.*worker:0.*trireme 0.9.*is 1.0"):
        listen_hosts(facts, "1.0", allow_plaintext=True)
