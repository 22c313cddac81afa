from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from trireme.cluster.placement import MAX_RUNS, Run, divide, equal_bounds, first_division, runs_of
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


def fresh(servers: int, slots: int = 256) -> list[int]:
    bounds = equal_bounds(slots, servers)
    return [server for server in range(servers) for _ in range(bounds[server], bounds[server + 1])]


def moved(before: list[int], after: list[int]) -> int:
    return sum(old != new for old, new in zip(before, after, strict=True))


def most_runs(owners: list[int]) -> int:
    return max(Counter(run.owner for run in runs_of(owners)).values())


def test_a_newcomer_takes_the_adjacent_ends_of_its_neighbours() -> None:
    assert runs_of(divide(fresh(2), {0, 1, 2})) == [
        Run(0, 86, 0), Run(86, 171, 2), Run(171, 256, 1),
    ]  # fmt: skip


def test_who_goes_leaves_its_slots_to_its_neighbours() -> None:
    assert runs_of(divide(fresh(3), {0, 2})) == [Run(0, 128, 0), Run(128, 256, 2)]


def test_a_division_that_is_equal_stays() -> None:
    assert divide([1] * 5 + [0] * 6 + [1, 2, 2, 2, 2, 2], [0, 1, 2]) == [
        *[1] * 5, *[0] * 6, 1, *[2] * 5,
    ]  # fmt: skip


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 5, 6])
def test_one_more_server_moves_only_its_part(servers: int) -> None:
    before = fresh(servers)
    after = divide(before, range(servers + 1))
    assert moved(before, after) == after.count(servers) == 256 // (servers + 1)


@pytest.mark.parametrize("servers", [2, 3, 4, 5, 6, 7, 12])
def test_one_server_less_moves_only_its_part(servers: int) -> None:
    before = fresh(servers)
    for gone in range(servers):
        after = divide(before, set(range(servers)) - {gone})
        assert moved(before, after) == before.count(gone)


@pytest.mark.parametrize("servers", [8, 12, 30])
def test_where_runs_would_be_many_each_server_gets_one(servers: int) -> None:
    before = fresh(servers)
    after = divide(before, range(servers + 1))
    assert most_runs(after) == 1
    assert moved(before, after) <= 0.6 * 256


@st.composite
def divisions(draw: st.DrawFn) -> tuple[list[int], set[int]]:
    runs = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 20)), min_size=1, max_size=12))
    owners = [owner for owner, length in runs for _ in range(length)]
    count = min(8, len(owners))
    servers = draw(st.sets(st.integers(0, 8), min_size=1, max_size=count))
    return owners, servers


@given(divisions())
def test_whatever_it_was_the_parts_are_equal_the_runs_few_and_it_stays(
    given: tuple[list[int], set[int]],
) -> None:
    owners, servers = given
    after = divide(owners, servers)
    loads = Counter(after)
    assert set(loads) == servers
    assert max(loads.values()) - min(loads.values()) <= 1
    assert most_runs(after) <= MAX_RUNS
    assert divide(after, servers) == after
    if most_runs(after) > 1:  # nobody took slots and gave up others
        before = Counter(owners)
        assert moved(owners, after) == sum(max(0, loads[s] - before[s]) for s in servers)
