from __future__ import annotations

from collections.abc import Collection

import hypothesis.strategies as st
import pytest
from hypothesis import given

from trireme.cluster.placement import Shards, balanced, first_division
from trireme.cluster.view import ShardEntry
from trireme.ps.layout import Layout

HOSTS = st.dictionaries(st.integers(0, 40), st.sampled_from("abc"), min_size=1, max_size=12)


class TestFirstDivision:
    def test_each_server_is_primary_of_one_shard_and_the_next_holds_its_copy(self) -> None:
        shards = first_division({0: "h", 1: "h", 2: "h"}, 256, 2)
        assert shards == (
            ShardEntry(0, 85, 0, (1,)),
            ShardEntry(85, 170, 1, (2,)),
            ShardEntry(170, 256, 2, (0,)),
        )

    def test_copies_are_on_other_hosts(self) -> None:
        shards = first_division({0: "a", 1: "a", 2: "b", 3: "b"}, 256, 2)
        assert [shard.copies for shard in shards] == [(0, 2), (1, 3), (2, 1), (3, 0)]

    def test_a_third_copy_is_on_a_host_of_its_own_where_there_is_one(self) -> None:
        shards = first_division({0: "a", 1: "a", 2: "b", 3: "c"}, 256, 3)
        assert [shard.copies for shard in shards] == [(0, 2, 3), (1, 2, 3), (2, 1, 3), (3, 0, 2)]

    def test_without_servers_there_is_no_shard(self) -> None:
        assert first_division({}, 256, 1) == ()

    @given(hosts=HOSTS, replicas=st.integers(1, 4), slots=st.sampled_from((12, 13, 256)))
    def test_every_slot_has_its_copies(
        self, hosts: dict[int, str], replicas: int, slots: int
    ) -> None:
        shards = first_division(hosts, slots, replicas)
        bounds = [shard.start for shard in shards] + [slots]
        assert bounds[0] == 0 and [shard.stop for shard in shards] == bounds[1:]
        assert max(s.stop - s.start for s in shards) - min(s.stop - s.start for s in shards) <= 1
        assert [shard.primary for shard in shards] == sorted(hosts)
        for shard in shards:
            assert len(set(shard.copies)) == min(replicas, len(hosts))
            apart = {hosts[server] for server in shard.copies}
            assert len(apart) == min(len(shard.copies), len(set(hosts.values())))


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 16])
def test_the_first_division_is_that_of_the_layout(servers: int) -> None:
    layout = Layout.of([], servers=servers)
    shards = first_division(dict.fromkeys(range(servers), "h"), layout.spec.slots, 1)
    slots = [range(shard.start, shard.stop) for shard in shards]
    assert slots == [layout.slots_of(server) for server in range(servers)]


def fresh(servers: int) -> Shards:
    return first_division(dict.fromkeys(range(servers), "h"), 256, 1)


def moved(before: Shards, after: Shards) -> int:
    """How many slots another server is primary of."""
    old, new = (
        [shard.primary for shard in some for _ in range(shard.start, shard.stop)]
        for some in (before, after)
    )
    return sum(one != other for one, other in zip(old, new, strict=True))


def divided(shards: Shards, servers: Collection[int]) -> Shards:
    return balanced(shards, dict.fromkeys(servers, "h"), 1)


def test_a_newcomer_takes_the_adjacent_ends_of_its_neighbours() -> None:
    after = divided(fresh(2), {0, 1, 2})
    assert [(shard.stop, shard.primary) for shard in after] == [(85, 0), (170, 2), (256, 1)]


def test_who_goes_leaves_its_slots_to_its_neighbours() -> None:
    after = divided(fresh(3), {0, 2})
    assert [(shard.stop, shard.primary) for shard in after] == [(128, 0), (256, 2)]


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 5, 6, 12])
def test_one_server_more_or_less_moves_few_slots(servers: int) -> None:
    before = fresh(servers)
    assert moved(before, divided(before, range(servers + 1))) <= 0.5 * 256
    larger = fresh(servers + 1)
    for gone in range(servers + 1):
        assert moved(larger, divided(larger, {*range(servers + 1)} - {gone})) <= 0.6 * 256


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.sets(st.integers(0, 8), min_size=1))
def test_whatever_it_was_each_server_gets_one_equal_part_and_it_stays(
    owners: list[int], servers: set[int]
) -> None:
    shards = tuple(ShardEntry(20 * n, 20 * n + 20, owner) for n, owner in enumerate(owners))
    after = divided(shards, servers)
    sizes = [shard.stop - shard.start for shard in after]
    assert sorted(shard.primary for shard in after) == sorted(servers)
    assert max(sizes) - min(sizes) <= 1
    assert divided(after, servers) == after
