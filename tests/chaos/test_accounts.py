"""The accounts find what is lost, doubled or torn; the times are what the notes say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.accounts import (
    Account,
    FaultRow,
    Note,
    Struck,
    accounts,
    acknowledged_at,
    fault_table,
    goodput,
    longest_gap,
    unanswered,
)

WELL = Account(attempted=10, acknowledged=9, stale=0, ended=False, applied=(10.0, 10.0, 10.0))


@pytest.mark.parametrize("applied", [9.0, 10.0])
def test_what_was_under_way_may_be_applied_or_not(applied: float) -> None:
    assert replace(WELL, applied=(applied,) * 3).problem() == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"applied": (8.0,) * 3}, "1 acknowledged updates are LOST"),
        ({"applied": (11.0,) * 3}, "1 updates are applied TWICE"),
        ({"applied": (10.0, 9.0, 10.0)}, "disagree"),
        ({"applied": (9.5,) * 3}, "no whole number"),
        ({"ended": True}, "it lived to the end"),
        ({"stale": 1}, "1 updates are applied TWICE"),
    ],
    ids=str,
)
def test_what_is_wrong_is_found(change: dict[str, object], said: str) -> None:
    assert said in replace(WELL, **change).problem()  # type: ignore[arg-type]


def test_who_lived_to_the_end_has_everything_acknowledged() -> None:
    ended = Account(attempted=10, acknowledged=9, stale=1, ended=True, applied=(9.0,) * 3)
    assert ended.problem() == ""


def notes(*words: tuple[str, int, int, float]) -> list[Note]:
    return [Note(*each) for each in words]


def test_notes_are_read_as_they_were_written() -> None:
    note = Note("joined", 2, 3, 12.25, 1.5)
    assert Note.read(note.line()) == note


def test_accounts_are_by_incarnation_and_know_rows_without_notes() -> None:
    found = accounts(
        notes(
            ("attempted", 0, 1, 1.0),
            ("acknowledged", 0, 1, 1.1),
            ("attempted", 0, 2, 2.0),
            ("attempted", 1, 1, 2.0),
            ("stale", 1, 1, 2.1),
            ("ended", 1, 1, 3.0),
        ),
        {(0, 1): (1.0,) * 3, (2, 1): (5.0,) * 3},
    )
    assert list(found) == [(0, 1), (0, 2), (1, 1), (2, 1)]
    assert [not each.problem() for each in found.values()] == [True, True, True, False]
    assert "TWICE" in found[2, 1].problem()
    assert unanswered(found.values()) == 1


def test_the_longest_gap_is_within_the_part() -> None:
    times = [1.0, 2.0, 5.0, 5.5, 9.0]
    assert longest_gap(times, 1.5, 5.2) == 3.0
    assert longest_gap(times, 2.5, 4.5) == 2.0  # nothing at all came
    assert longest_gap(times, 8.8, 10.0) == 1.0


def test_the_table_has_a_line_for_each_kind() -> None:
    struck = [
        Struck("kill", "ps:0", 1.0, 4.0),
        Struck("kill", "ps:1", 6.0, 7.0),
        Struck("cut", "a", 8.0, 9.0),
    ]
    times = [1.5, 3.0, 3.9, 6.5, 8.5]
    table = fault_table(struck, times)
    assert [(row.fault, row.count) for row in table] == [("cut", 1), ("kill", 2)]
    assert table[0] == FaultRow("cut", 1, 0.5, 0.5)
    assert (table[1].median_stall, table[1].worst_stall) == (1.0, 1.5)


def test_goodput_takes_the_starts_and_the_silence_out() -> None:
    heard = [Note("acknowledged", 0, 1, float(at)) for at in range(1, 11)]
    begun = [Note("joined", 0, 2, 5.0, 3.0), Note("joined", 0, 1, 0.5, 100.0)]
    found = goodput([*heard, *begun], 1.0, 11.0, others=1.0, cores=2)
    assert found.plain == 1.0
    assert found.starting == 4.0
    assert found.without_starts() == 10 / 8
    assert found.without_starts(3.0) == 10 / 5
    assert acknowledged_at(reversed(heard)) == [float(at) for at in range(1, 11)]
