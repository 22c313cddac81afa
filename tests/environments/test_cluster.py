from __future__ import annotations

import pytest

from trireme.environments.cluster import ClusterSpec
from trireme.errors import ConfigurationError


def test_classic_strings() -> None:
    spec = ClusterSpec.from_hosts("a:2222", "b:2223, c:2224")
    assert spec.ps == ("a:2222",)
    assert spec.worker == ("b:2223", "c:2224")
    assert spec.address("worker", 1) == "c:2224"


def test_server_zero_hosts_the_coordinator_unless_one_is_named() -> None:
    by_hand = ClusterSpec.from_hosts("a:2222,d:1", "b:2223")
    named = ClusterSpec.from_hosts("a:2222,d:1", "b:2223", "e:9")
    assert by_hand.coordinator_address == by_hand.address("coordinator", 0) == "a:2222"
    assert named.coordinator_address == "e:9"
    assert ClusterSpec.from_hosts("", "b:2223").coordinator_address == ""
    assert ClusterSpec(("a:1",), ("b:2",), "a:1").coordinator_address == "a:1"


@pytest.mark.parametrize(
    "address",
    ["a", "a:", ":1", "a:0", "a:65536", "a:x", "a:-1", "a:²", "::1:22", "tcp://a:1", "a b/c:1", ""],
)
def test_addresses_that_make_no_sense_are_named(address: str) -> None:
    with pytest.raises(ConfigurationError, match="worker:1"):
        ClusterSpec(ps=(), worker=("a:1", address))


@pytest.mark.parametrize("address", ["a:1", "10.0.0.1:65535", "[::1]:2222"])
def test_addresses_that_make_sense(address: str) -> None:
    assert ClusterSpec(ps=(), worker=(address,)).worker == (address,)


def test_an_address_given_twice_names_both() -> None:
    with pytest.raises(ConfigurationError, match="ps:0 and worker:1"):
        ClusterSpec.from_hosts("a:1", "b:1,a:1")
    with pytest.raises(ConfigurationError, match="ps:1 and coordinator:0"):
        ClusterSpec.from_hosts("a:1,c:1", "b:1", "c:1")


def test_an_empty_entry_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="worker_hosts"):
        ClusterSpec.from_hosts("a:1", "b:1,,c:1")


def test_a_cluster_has_a_worker() -> None:
    with pytest.raises(ConfigurationError, match="no worker"):
        ClusterSpec.from_hosts("a:1", " ")


@pytest.mark.parametrize(
    ("role", "index", "says"),
    [
        ("worker", 2, "worker:0 to worker:1"),
        ("worker", -1, "worker:0 to worker:1"),
        ("ps", 1, "ps:0 alone"),
        ("coordinator", 1, "coordinator:0 alone"),
        ("chief", 0, "coordinator, ps, worker"),
    ],
)
def test_a_task_outside_the_cluster_is_told_how_many_there_are(
    role: str, index: int, says: str
) -> None:
    spec = ClusterSpec.from_hosts("a:1", "b:1,c:1")
    with pytest.raises(ConfigurationError, match=says) as caught:
        spec.check_task(role, index)
    assert role == "chief" or str(caught.value).startswith(f"{role}:{index} is outside")


def test_a_role_without_tasks() -> None:
    with pytest.raises(ConfigurationError, match="no ps at all"):
        ClusterSpec.from_hosts("", "b:1").check_task("ps", 0)


@pytest.mark.parametrize("option", ["ps_hosts", "worker_hosts"])
def test_an_empty_entry_is_refused_by_the_name_of_its_option(option: str) -> None:
    hosts = {"ps_hosts": "a:1", "worker_hosts": "b:1", option: "c:1,,d:1"}
    with pytest.raises(ConfigurationError, match=f"^{option} is 'c:1,,d:1', with an empty entry"):
        ClusterSpec.from_hosts(**hosts)
