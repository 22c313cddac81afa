from __future__ import annotations

from dataclasses import replace

import pytest

from trireme.agents.agent import NodeFacts
from trireme.agents.hosts import check_process_groups, listen_hosts
from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig
from trireme.launch.config.task_config import GroupMember, TaskConfig
from trireme.launch.launcher import tasks_of_job

HERE = NodeFacts(node="n1", address="10.0.0.1", host="kernel/1", hostname="h1", version="1.0")
THERE = NodeFacts(node="n2", address="10.0.0.2", host="kernel/2", hostname="h2", version="1.0")


def test_tasks_of_one_host_listen_at_loopback() -> None:
    facts = {"ps:0": HERE, "worker:0": replace(HERE, node="n3", address="10.0.0.3")}
    assert set(listen_hosts(facts, "1.0", may_grow=False).values()) == {"127.0.0.1"}


def test_tasks_that_others_may_join_listen_at_their_nodes_from_the_start() -> None:
    facts = {"ps:0": HERE, "worker:0": HERE}
    assert set(listen_hosts(facts, "1.0", may_grow=True).values()) == {"10.0.0.1"}


def test_tasks_of_several_hosts_listen_at_their_nodes() -> None:
    facts = {"ps:0": HERE, "worker:0": replace(THERE, address="fe80::2")}
    assert listen_hosts(facts, "1.0", may_grow=False) == {
        "ps:0": "10.0.0.1",
        "worker:0": "[fe80::2]",
    }


def grouped(allow_plaintext: bool, workers: int, servers: int, processes: int) -> TaskConfig:
    config = JobConfig().replaced("a test", allow_plaintext=allow_plaintext)
    group = GroupMember(size=processes)
    return TaskConfig(job="j", workers=workers, servers=servers, group=group, config=config)


def spread(task: TaskConfig) -> dict[str, NodeFacts]:
    """Each task on the other node than the one before."""
    names = [each.name for each in tasks_of_job(task)]
    return {name: (HERE, THERE)[number % 2] for number, name in enumerate(names)}


@pytest.mark.parametrize(("workers", "servers", "processes"), [(2, 0, 2), (1, 1, 2)])
def test_a_process_group_over_several_hosts_needs_a_word_of_trust(
    workers: int, servers: int, processes: int
) -> None:
    task = grouped(False, workers, servers, processes)
    with pytest.raises(
        ConfigurationError, match=r"several hosts \(10.0.0.1, 10.0.0.2\).*--allow-plaintext"
    ):
        check_process_groups(task, spread(task))
    check_process_groups(task, dict.fromkeys(spread(task), THERE))
    check_process_groups(grouped(True, workers, servers, processes), spread(task))


def test_workers_of_one_process_and_groups_of_one_host_need_none() -> None:
    task = grouped(False, 4, 2, 1)
    check_process_groups(task, spread(task))
    task = grouped(False, 2, 1, 2)
    facts = {name: THERE if "worker:1" in name else HERE for name in spread(task)}
    check_process_groups(task, facts)


def test_a_node_without_the_program_is_named() -> None:
    facts = {"ps:0": HERE, "worker:0": replace(THERE, problem="there is no directory /w")}
    with pytest.raises(ConfigurationError, match=r"worker:0 .* 10.0.0.2 \(n2\): there is no dir"):
        listen_hosts(facts, "1.0", may_grow=False)


def test_a_node_with_another_version_is_named() -> None:
    facts = {"ps:0": HERE, "worker:0": replace(THERE, version="0.9")}
    with pytest.raises(ConfigurationError, match=r"10.0.0.2.*worker:0.*trireme 0.9.*is 1.0"):
        listen_hosts(facts, "1.0", may_grow=False)
