from __future__ import annotations

from typing import Any

from trireme.cluster.messages import ClusterStatus
from trireme.cluster.view import ShardEntry
from trireme.screen.placement import events, lines, shortages, summary

FULL = (ShardEntry(0, 64, 0, (1,)), ShardEntry(64, 256, 1, (0,)))
SHORT = (ShardEntry(0, 64, 1), ShardEntry(64, 256, 1, (), (2,)))


def status(shards: tuple[ShardEntry, ...], **fields: Any) -> ClusterStatus:
    return ClusterStatus("running", "", 3, (), (), shards=shards, **fields)


def test_each_shard_has_a_line_with_its_servers() -> None:
    placement = status(FULL, generation=3, replicas=2, servers=2)
    assert summary(placement) == "generation 3: 2 shards, 2 copies of each"
    assert [*lines(placement)] == [
        "shard 0 (slots 0-63, 25%): primary ps:0; backup ps:1",
        "shard 1 (slots 64-255, 75%): primary ps:1; backup ps:0",
    ]
    assert [*shortages(placement)] == []


def test_copies_that_are_missing_are_told_and_who_is_being_filled() -> None:
    placement = status(SHORT, next_shards=FULL, generation=4, life=1, replicas=2, servers=3)
    assert summary(placement) == (
        "generation 4: 2 shards, 2 copies of each, rolled back 1 time, being redistributed"
    )
    assert [*shortages(placement)] == [
        "shard 0 has 1 of 2 copies (ps:1)",
        "shard 1 has 1 of 2 copies (ps:1): ps:2 is being filled",
    ]
    assert [*lines(placement)][1].endswith("primary ps:1; being filled ps:2")


def test_one_server_cannot_lack_a_second_copy() -> None:
    assert [*shortages(status(SHORT[:1], replicas=2, servers=1))] == []


def test_takeovers_and_rollbacks_are_told_for_a_while() -> None:
    took = {"took_over": "shard 0 from ps:0", "took_over_seconds": 12.4}
    back = {"rolled_back_seconds": 3.0}
    assert [*events({"ps:1": took | back, "ps:2": back})] == [
        "all copies of a shard were lost 3 s ago: the job went back",
        "ps:1 took over shard 0 from ps:0, 12 s ago",
    ]
    assert [*events({"ps:1": took | {"took_over_seconds": 61.0}, "ps:2": {}})] == []
