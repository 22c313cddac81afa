from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from trireme.cluster.placement import MAX_RUNS, Run, divide, equal_bounds, runs_of


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
