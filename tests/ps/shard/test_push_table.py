"""The exactly-once table: what became of every push, and what of it outlives a process."""

from __future__ import annotations

import pytest

from trireme.ps.messages import Applied, Stale, WorkerProgress
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import PushTable


def push(worker: int, sequence: int, *, incarnation: int = 1) -> tuple[Participant, int]:
    return Participant(worker, incarnation), sequence


def table_of(*workers: int) -> PushTable:
    table = PushTable()
    for worker in workers:
        table.admit(worker, 1)
    table.count([(worker, 1) for worker in workers])
    return table


def test_what_is_decided_is_kept_until_the_worker_has_it() -> None:
    table = table_of(0)
    record = table.records[0]
    table.decide(*push(0, 1), Applied(7))
    table.decide(*push(0, 2), Stale(8))
    assert record.verdicts == {1: Applied(7), 2: Stale(8)}
    table.forget_acknowledged(0, 1)
    assert record.verdicts == {2: Stale(8)}
    assert (record.sequence, table.clocks, record.applied, record.stale) == (2, {(0, 1): 2}, 1, 1)


@pytest.mark.parametrize("sequence", [1, 3])
def test_a_push_is_decided_once_and_none_is_skipped(sequence: int) -> None:
    table = table_of(4)
    table.decide(*push(4, 1), Applied(1))
    with pytest.raises(AssertionError, match=rf"worker:4: push {sequence} decided after 1"):
        table.decide(*push(4, sequence), Applied(2))


def test_a_newer_start_counts_from_one_again() -> None:
    table = table_of(0)
    table.decide(*push(0, 1), Applied(1))
    record = table.admit(0, 2)
    assert (record.incarnation, record.sequence) == (2, 0)
    assert (record.verdicts, record.applied) == ({}, 1)
    table.decide(*push(0, 1, incarnation=2), Applied(2))
    assert (record.sequence, table.clocks, record.applied) == (1, {(0, 1): 1}, 2), (
        "not yet a member"
    )


def test_the_same_start_again_changes_nothing() -> None:
    table = table_of(0)
    table.decide(*push(0, 1), Applied(1))
    assert table.admit(0, 1).sequence == 1
    table.count([(0, 1)])
    assert table.clocks == {(0, 1): 1}


def test_an_update_of_a_replaced_start_is_only_counted() -> None:
    table = table_of(0)
    table.admit(0, 2)
    table.count([(0, 2)])
    table.decide(*push(0, 9, incarnation=1), Applied(3))
    record = table.records[0]
    assert (record.sequence, table.clocks, record.applied) == (0, {(0, 2): 0}, 1)
    assert record.verdicts == {}


def test_an_update_of_a_start_that_still_counts_is_counted_though_a_newer_one_is_known() -> None:
    """One shard may know the newer start before this update is decided, and another after it."""
    table = table_of(0)
    table.admit(0, 2)
    table.decide(*push(0, 9, incarnation=1), Applied(3))
    assert table.clocks == {(0, 1): 1}


def test_the_slowest_is_looked_for_among_those_that_train() -> None:
    table = table_of(0, 1, 2)
    for sequence in (1, 2, 3):
        table.decide(*push(0, sequence), Applied(sequence))
    table.decide(*push(1, 1), Applied(4))
    assert table.slowest() == 0
    table.count([(0, 1), (1, 1)])
    assert table.slowest() == 1
    table.count([(0, 1)])
    assert table.slowest() == 3
    table.count([])
    assert table.slowest() == 0


def test_a_newcomer_counts_from_the_slowest_of_those_that_stay() -> None:
    table = table_of(0, 1, 2)
    for sequence in (1, 2, 3):
        table.decide(*push(0, sequence), Applied(sequence))
    table.decide(*push(1, 1), Applied(4))
    table.count([(0, 1), (1, 1), (2, 2), (7, 1)])
    counts = {(0, 1): 3, (1, 1): 1, (2, 2): 1, (7, 1): 1}
    assert table.clocks == counts, "7 is not admitted yet, and 2 is another start of it"
    table.decide(*push(2, 1), Stale(4))
    assert table.clocks == counts, "an update of the start before"


def test_counts_outlive_the_job_and_sequences_do_not() -> None:
    table = table_of(2, 0)
    table.decide(*push(0, 1), Applied(1))
    table.decide(*push(0, 2), Stale(1))
    rows = table.export()
    assert rows == (WorkerProgress(0, 1, 2, 1, 1), WorkerProgress(2, 1, 0, 0, 0))
    resumed = PushTable()
    resumed.restore(rows)
    record = resumed.admit(0, 1)
    assert (record.incarnation, record.sequence) == (1, 0)
    resumed.decide(*push(0, 1), Applied(2))
    assert (record.applied, record.stale) == (2, 1)


def test_of_a_snapshot_only_the_counts_are_taken_over() -> None:
    table = PushTable()
    table.restore([WorkerProgress(3, 2, 9, 5, 1)])
    assert table.export() == (WorkerProgress(3, 0, 0, 5, 1),)
    record = table.records[3]
    assert record.verdicts == {}
    table.admit(3, 1)
    assert table.export() == (WorkerProgress(3, 1, 0, 5, 1),)
