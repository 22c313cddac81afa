"""Who is wrong, in all cases of few copies."""

from __future__ import annotations

from itertools import product

import pytest

from trireme.corruption.checks import Checks
from trireme.errors import CorruptedValues
from trireme.job_config import JobConfig


def judge(*digests: int, names: str = "ab", own: str = "") -> tuple[list[str], list[str], str]:
    """Returns the good and the wrong of copies, with one tensor alike, and what is said."""
    said: list[str] = []
    config = JobConfig().replaced("file", check_every=1, on_corruption="heal")
    copies = {
        f"ps:{number}": {"same": 1} | dict.fromkeys(names, each)
        for number, each in enumerate(digests)
    }
    good, wrong = Checks(config, said.append).compare("shard 1", 20, copies, own)
    return good, wrong, "".join(said).removeprefix("corrupted values: ")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_case_of_few_copies(count: int) -> None:
    for digests in product(range(count), repeat=count):
        groups = [{f"ps:{n}" for n in range(count) if digests[n] == each} for each in {*digests}]
        sizes = sorted(map(len, groups))
        if len(groups) > 1 and sizes[-1] == sizes[-2]:
            with pytest.raises(CorruptedValues, match="nothing says who is right"):
                judge(*digests)
            continue
        good, wrong, said = judge(*digests)
        assert bool(wrong) == bool(said) == (len(groups) > 1)
        if wrong:
            assert {*good} in groups and len(good) == sizes[-1]
            assert {*good, *wrong} == set().union(*groups) and len(good + wrong) == count


def test_who_is_wrong_is_said_with_what_differs() -> None:
    assert judge(1, 1, 9, names="abcd")[2] == (
        "ps:2 has other values of shard 1 than ps:0, ps:1 at step 20, in a, b, c, ..."
    )
    with pytest.raises(CorruptedValues) as raised:
        judge(1, 9, names="a")
    assert f"{raised.value}" == (
        "corrupted values: ps:0 and ps:1 have different values of shard 1 at step 20, in a; "
        "nothing says who is right"
    )


def test_who_is_right_says_nothing_where_each_speaks_for_itself() -> None:
    good, wrong, said = judge(1, 1, 9, own="ps:0")
    assert (good, wrong, said) == (["ps:0", "ps:1"], ["ps:2"], "")
    assert judge(1, 1, 9, own="ps:2")[2].startswith("ps:2 has other values")
