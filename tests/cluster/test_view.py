from __future__ import annotations

from trireme.cluster.view import ShardEntry, View


def test_the_copies_of_a_view_are_those_of_the_shard_with_the_fewest() -> None:
    two, one = ShardEntry(0, 8, 2, (0,)), ShardEntry(8, 16, 1, (), (0,))
    assert View(1, (), (), (two, two)).copies == 2
    assert View(1, (), (), (two, one)).copies == 1, "what is being filled does not count"
    assert View(1, (), ()).copies == 1


def test_the_primary_of_a_shard_is_named_where_it_is() -> None:
    view = View(3, (), (), (ShardEntry(0, 8, 2), ShardEntry(8, 16, 0)))
    assert [view.primary_name(shard) for shard in (0, 1)] == ["ps:2", "ps:0"]
    assert View(0, (), ()).primary_name(1) == "ps:1", "before the first view"
