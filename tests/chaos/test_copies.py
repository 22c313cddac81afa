"""When a job is whole, and which servers it can do without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.chaos.copies import bound, can_do_without, incomplete, moved_share, spare_servers
from trireme.cluster.messages import TaskStatus
from trireme.cluster.view import ShardEntry


def task(role: str, index: int, state: str = "live") -> TaskStatus:
    return TaskStatus(role, index, state, "", 1, "", 1, "", 0.0, {})  # type: ignore[arg-type]


def status(*shards: ShardEntry, lost: tuple[int, ...] = (), **changes: Any) -> Any:
    tasks = [task("ps", index, "lost" if index in lost else "live") for index in range(3)]
    tasks += [task("worker", index) for index in range(2)]
    values = {"phase": "running", "reason": "r", "tasks": tasks, "next_shards": ()} | changes
    return SimpleNamespace(shards=shards, **values)


WHOLE = (ShardEntry(0, 1, 0, (1,)), ShardEntry(1, 2, 1, (2,)))


def test_a_job_is_whole_when_all_live_and_all_copies_are_there() -> None:
    assert incomplete(status(*WHOLE), 3, 2, 2) == ""
    assert incomplete(status(*WHOLE, lost=(2,)), 3, 2, 2) == "2 of 3 live: ps:0, ps:1"
    assert incomplete(status(*WHOLE), 3, 3, 2) == "2 of 3 live: worker:0, worker:1"
    assert incomplete(status(*WHOLE), 3, 2, 3) == "shard 0 has 2 of 3 copies"
    assert incomplete(status(*WHOLE, next_shards=WHOLE), 3, 2, 2) == "slots are moving"
    joining = ShardEntry(0, 1, 0, (1,), (2,))
    assert "shard 0 has 2" in incomplete(status(joining), 3, 2, 2)
    assert "the job is failed: r" in incomplete(status(*WHOLE, phase="failed"), 3, 2, 2)


def test_the_last_copy_is_never_spared() -> None:
    assert spare_servers(status(*WHOLE)) == [0, 1, 2]
    assert not can_do_without(status(*WHOLE), [0, 1])
    assert can_do_without(status(*WHOLE), [0, 2])
    assert spare_servers(status(*WHOLE, lost=(2,))) == [0]  # shard 1 is on server 1 alone
    assert spare_servers(status(ShardEntry(0, 1, 0))) == [1, 2]
    assert spare_servers(status()) == []  # where the coordinator names no shards


def test_servers_need_those_with_copies_and_the_one_with_shard_0() -> None:
    assert bound(status(*WHOLE)) == {(0, 1), (1, 2)}
    apart = (ShardEntry(0, 1, 0, (1,)), ShardEntry(1, 2, 2, (3,)))
    assert bound(status(*apart)) == {(0, 1), (2, 3), (0, 2)}
    assert bound(status(ShardEntry(0, 1, 0))) == set()


def test_the_share_of_the_slots_that_have_another_primary() -> None:
    two = (ShardEntry(0, 3, 0), ShardEntry(3, 6, 1))
    three = (ShardEntry(0, 2, 0), ShardEntry(2, 4, 2), ShardEntry(4, 6, 1))
    assert moved_share(two, two) == 0
    assert moved_share(two, three) == moved_share(three, two) == 2 / 6
