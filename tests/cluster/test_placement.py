from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from trireme.cluster.placement import first_division
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
