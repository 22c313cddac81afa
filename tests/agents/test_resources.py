from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.agents.resources import choose_nodes, resources_of, total
from trireme.ray.options import RayOptions

SERVERS = ("ps:0", "ps:1", "ps:2")
WORKERS = ("worker:0", "worker:1", "worker:2", "worker:3")


def nodes(**cores: float) -> dict[str, dict[str, float]]:
    return {name: {"CPU": free, "memory": 1e9} for name, free in cores.items()}


def test_the_tasks_of_a_role_are_on_as_many_nodes_as_possible() -> None:
    chosen = choose_nodes((*SERVERS, *WORKERS), RayOptions(), nodes(a=4, b=3, c=1), {})
    assert chosen.keys() == {*SERVERS, *WORKERS}
    assert {chosen[name] for name in SERVERS} == {"a", "b", "c"}
    assert Counter(chosen[name] for name in WORKERS) == {"a": 2, "b": 2}  # c is full


def test_workers_that_are_packed_are_on_as_few_nodes_as_possible() -> None:
    options = RayOptions(pack_workers=True)
    chosen = choose_nodes((*SERVERS, *WORKERS), options, nodes(a=8, b=3, c=6), {})
    assert len({chosen[name] for name in SERVERS}) == 3
    assert len({chosen[name] for name in WORKERS}) == 1


def test_a_task_that_comes_later_avoids_the_nodes_that_have_its_like() -> None:
    taken = {"ps:0": "a", "ps:1": "b", "worker:0": "c"}
    free = nodes(a=9, b=9, c=1)
    assert choose_nodes(["ps:2"], RayOptions(), free, taken) == {"ps:2": "c"}
    assert choose_nodes(["ps:2"], RayOptions(), free, {**taken, "ps:3": "c"})["ps:2"] in "ab"


def test_who_finds_no_room_gets_no_node_and_the_others_do() -> None:
    options = RayOptions(cpus_per_worker=2, gpus_per_worker=0.5)
    free = {"a": {"CPU": 1.0}, "b": {"CPU": 9.0, "GPU": 1.0}}
    chosen = choose_nodes(("ps:0", *WORKERS), options, free, {})
    assert chosen == {"ps:0": "b", "worker:0": "b", "worker:1": "b"}


@given(
    free=st.dictionaries(st.sampled_from("abcde"), st.integers(0, 9), max_size=5),
    cpus=st.integers(1, 3),
    pack=st.booleans(),
    taken=st.dictionaries(st.sampled_from(["ps:7", "ps:8", "worker:8"]), st.sampled_from("abx")),
)
def test_no_node_gets_more_than_it_has_and_nobody_waits_without_need(
    free: dict[str, int], cpus: int, pack: bool, taken: dict[str, str]
) -> None:
    options = RayOptions(cpus_per_worker=cpus, pack_workers=pack)
    names = (*SERVERS, *WORKERS)
    chosen = choose_nodes(names, options, nodes(**free), taken)
    left = dict(free)
    for name, node in chosen.items():
        left[node] -= cpus if name.startswith("worker:") else 1
    assert all(cores >= 0 for cores in left.values())
    for name in {*names} - chosen.keys():
        assert all(cores < resources_of(name, options)["CPU"] for cores in left.values())


@pytest.mark.parametrize("gpus", [0.0, 0.5])
def test_the_sum_of_resources(gpus: float) -> None:
    options = RayOptions(cpus_per_worker=2, gpus_per_worker=gpus)
    needs = [resources_of(name, options) for name in ("ps:0", "worker:0", "worker:1")]
    assert total(needs) == {"CPU": 5.0} | ({"GPU": 1.0} if gpus else {})
