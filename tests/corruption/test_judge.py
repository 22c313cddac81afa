"""Who is wrong, in all cases of few copies."""

from __future__ import annotations

from itertools import chain, combinations, product

import pytest

from trireme.corruption.judge import Verdict, judge


def copies(*digests: int) -> dict[str, tuple[int, int]]:
    """Copies of two tensors, of which the second differs."""
    return {f"ps:{number}": (1, each) for number, each in enumerate(digests)}


def cases(count: int) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    tasks = [f"ps:{number}" for number in range(count)]
    suspected = chain.from_iterable(combinations(tasks, n) for n in range(count + 1))
    return [(d, s) for s in suspected for d in product(range(count), repeat=count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_case_of_few_copies(count: int) -> None:
    for digests, suspects in cases(count):
        verdict = judge(copies(*digests), suspects)
        groups: dict[int, set[str]] = {}
        for number, each in enumerate(digests):
            groups.setdefault(each, set()).add(f"ps:{number}")
        if len(groups) == 1:
            assert verdict is None
            continue
        assert verdict is not None and verdict.tensors == (1,)
        everybody = set().union(*groups.values())
        if not verdict.good:
            assert set(verdict.wrong) == everybody
            sizes = sorted(len(g) for g in groups.values() if g - set(suspects))
            assert len(sizes) != 1, "one group alone is trusted"
            sizes = sizes or sorted(map(len, groups.values()))
            assert sizes[-1] == 1 or sizes[-1] == sizes[-2], "two that agree are right"
            continue
        good = set(verdict.good)
        assert good in groups.values() and good | set(verdict.wrong) == everybody
        trusted = [g for g in groups.values() if g - set(suspects)]
        if good - set(suspects):
            others = [g for g in trusted if g != good]
            assert all(len(g) < len(good) for g in others)
            assert len(good) > 1 or not others
        else:
            assert not trusted and len(good) > 1


def test_two_copies_that_differ_are_undecided_unless_one_says_so_of_itself() -> None:
    assert judge(copies(1, 2)) == Verdict((1,), (), ("ps:0", "ps:1"))
    assert judge(copies(1, 2), {"ps:1"}) == Verdict((1,), ("ps:0",), ("ps:1",))
    assert judge(copies(1, 2), {"ps:0", "ps:1"}) == Verdict((1,), (), ("ps:0", "ps:1"))


def test_the_minority_is_wrong() -> None:
    assert judge(copies(1, 2, 1)) == Verdict((1,), ("ps:0", "ps:2"), ("ps:1",))
    assert judge(copies(1, 2, 3)) == Verdict((1,), (), tuple(copies(1, 2, 3)))
    assert judge(copies(1, 2, 3, 2)) == Verdict((1,), ("ps:1", "ps:3"), ("ps:0", "ps:2"))
    assert judge(copies(1, 1, 2, 2)) == Verdict((1,), (), tuple(copies(1, 1, 2, 2)))


def test_one_copy_and_equal_ones_give_no_verdict() -> None:
    assert judge({}) is None
    assert judge(copies(4)) is None
    assert judge(copies(4, 4, 4), {"ps:0"}) is None


def test_who_is_wrong_is_said_with_what_differs() -> None:
    copies = {"ps:0": (1, 2, 3, 4), "ps:1": (1, 2, 3, 4), "ps:2": (9, 9, 9, 9)}
    verdict = judge(copies)
    assert verdict is not None
    assert verdict.said("shard 1", 20, ["a", "b", "c", "d"]) == (
        "ps:2 has other values of shard 1 than ps:0, ps:1 at step 20, in a, b, c and 1 more"
    )
    del copies["ps:1"]
    verdict = judge(copies)
    assert verdict is not None
    assert verdict.said("shard 1", 20, []) == (
        "ps:0 and ps:2 have different values of shard 1 at step 20; nothing says who is right"
    )
