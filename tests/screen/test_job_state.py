from __future__ import annotations

import math
from pathlib import Path

import pytest

from trireme.cluster.messages import ClusterStatus, TaskStatus
from trireme.cluster.view import ShardEntry
from trireme.records.records import Begin, Record, RecordWriter, read_starts
from trireme.screen.job_state import (
    CORRUPTED,
    UNSAVED,
    JobSnapshot,
    TaskSnapshot,
    findings,
    from_cluster,
)


def task(role: str, index: int, quiet: float = 0.2, **status: float | str) -> TaskStatus:
    return TaskStatus(role, index, "live", "it joined", 1, "here", 7, "", quiet, status)


def picture(*tasks: TaskStatus, missing: tuple[str, ...] = ()) -> JobSnapshot:
    status = ClusterStatus("running", "every task has come", 1, missing, tasks)
    return from_cluster("digits.py", status, 12.5)


WORKER = dict(
    state="training",
    global_step=40,
    max_steps=100,
    examples_per_second=1000.0,
    data_seconds=0.001,
    compute_seconds=0.004,
    wait_seconds=0.003,
    applied=40,
)


def test_nothing_is_found_where_all_is_well() -> None:
    seen = picture(task("ps", 0, waiting=""), task("worker", 0, **WORKER), task("worker", 1))
    assert findings(seen) == []
    assert (seen.step, seen.last_step, seen.pace) == (40, 100, 1000.0)


def test_the_silent_one_is_named_with_who_waits_for_it() -> None:
    waits = {
        "waiting": "worker:0",
        "waiting_for": "worker:1",
        "waiting_reason": "round 41",
        "waiting_seconds": 1.4,
    }
    seen = picture(
        task("ps", 0, **waits), task("worker", 0, **WORKER), task("worker", 1, 1.8, **WORKER)
    )
    expected = "worker:1 has said nothing for 1.8 s; worker:0 waits for worker:1 (round 41)"
    assert findings(seen) == [expected]
    assert seen.pace == 1000.0  # what the silent one said last no longer holds


def test_a_wait_without_a_silent_task_is_told_once_it_is_long() -> None:
    def seen(seconds: float) -> JobSnapshot:
        waits = {"waiting": "worker:0", "waiting_for": "worker:1", "waiting_reason": "round 2"}
        return picture(task("ps", 0, **waits, waiting_seconds=seconds), task("worker", 1))

    assert findings(seen(0.1)) == []
    assert findings(seen(0.6)) == ["worker:0 waits for worker:1 (round 2)"]


def test_who_is_missing_and_who_is_gone_is_told() -> None:
    assert findings(picture(task("ps", 0), missing=("worker:1",))) == ["the job waits for worker:1"]
    lost = TaskStatus("worker", 0, "lost", "it said nothing", 1, "here", 7, "", 11.0, {})
    assert findings(picture(lost)) == ["worker:0 is lost: it said nothing"]


def test_a_checkpoint_that_is_not_saved_comes_before_all_else() -> None:
    lost = TaskStatus("worker", 1, "lost", "it said nothing", 1, "here", 7, "", 11.0, {})
    seen = picture(task("worker", 0, **{**WORKER, UNSAVED: "step 3 is NOT SAVED"}), lost)
    expected = ["worker:0: step 3 is NOT SAVED", "worker:1 is lost: it said nothing"]
    assert findings(seen) == expected
    waiting = picture(task("worker", 0, **{UNSAVED: "step 3 is NOT SAVED"}), missing=("ps:0",))
    assert findings(waiting) == ["worker:0: step 3 is NOT SAVED", "the job waits for ps:0"]


def test_corrupted_values_come_first() -> None:
    seen = picture(task("worker", 0, **{UNSAVED: "not saved"}), task("ps", 0, **{CORRUPTED: "bad"}))
    assert findings(seen) == ["ps:0: bad", "worker:0: not saved"]


SHARDS = (ShardEntry(0, 64, 0, (1,)), ShardEntry(64, 256, 0, (), (1,)))


def replicated(*tasks: TaskStatus) -> JobSnapshot:
    status = ClusterStatus(
        *("running", "", 4, (), tasks), replicas=2, servers=2, shards=SHARDS, generation=3
    )
    return from_cluster("digits.py", status, 12.5)


def test_missing_copies_and_takeovers_are_found_after_the_lost_tasks() -> None:
    took = {"took_over": "shard 1 from ps:1", "took_over_seconds": 4.0}
    lost = TaskStatus("ps", 1, "lost", "killed", 1, "here", 7, "", 11.0, took)
    assert findings(replicated(task("ps", 0, **took), lost)) == [
        "ps:1 is lost: killed",
        "shard 1 has 1 of 2 copies (ps:0): ps:1 is being filled",
        "ps:0 took over shard 1 from ps:1, 4 s ago",
    ]


def begin(name: str, job: str, time: float) -> Begin:
    return Begin(task=name, job=job, time=time, host="here", pid=7)


def record(time: float, step: int, loss: float = 1.0) -> Record:
    return Record(
        time=time,
        status={"state": "training", "global_step": step, "loss": loss},
        seconds={"compute": 0.5},
    )


def test_records_are_read_back_by_job_and_time(tmp_path: Path) -> None:
    for name, job, start in (("worker:0", "old", 1.0), ("worker:0", "new", 100.0)):
        writer = RecordWriter(tmp_path / "records", begin(name, job, start))
        for step in range(3):
            writer.write(record(start + step, step))
        writer.close()
    server = RecordWriter(tmp_path / "records", begin("ps:0", "new", 99.0))
    server.write(record(100.0, 7))
    server.close()
    starts = read_starts(tmp_path)
    assert [start.begin.task for start in starts] == ["ps:0", "worker:0"]
    assert [each.time for each in starts[1].records] == [100.0, 101.0, 102.0]


def test_records_become_rare_with_time_and_the_last_is_there(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "records", begin("worker:0", "job", 0.0))
    for half_seconds in range(1, 2 * 7200):
        writer.write(record(half_seconds / 2, half_seconds))
    writer.write(record(7200.0, 10**6), due=True)
    writer.close()
    (start,) = read_starts(tmp_path)
    assert 2000 < len(start.records) < 4000
    assert start.records[-1].status["global_step"] == 10**6


def test_a_torn_line_and_a_nan_are_borne(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "records", begin("worker:0", "job", 0.0))
    writer.write(record(1.0, 1, math.nan))
    writer.close()
    with (tmp_path / "records" / "worker-0.jsonl").open("ab") as file:
        file.write(b'{"line":"record","time":2.0,"status":{"state":"v\xe6"}}\n')  # no UTF-8
        file.write(b'{"line":"record","ti')
    (start,) = read_starts(tmp_path)
    assert [each.status["loss"] for each in start.records] == ["nan"]


def test_a_disk_that_takes_nothing_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "records").write_text("a file, not a directory")
    writer = RecordWriter(tmp_path / "records", begin("worker:0", "job", 0.0))
    writer.write(record(1.0, 1))
    writer.write(record(2.0, 2))
    assert len(caplog.records) == 1
    assert "worker:0 records nothing for now" in caplog.text


def test_no_records_are_none(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []
    assert TaskSnapshot("worker:0", "new").phases() == {}


def test_several_wait() -> None:
    waits = {"waiting": "worker:0, worker:2", "waiting_for": "worker:1", "waiting_reason": "x"}
    seen = picture(task("ps", 0, **waits, waiting_seconds=1.0), task("worker", 1))
    assert findings(seen) == ["worker:0, worker:2 wait for worker:1 (x)"]
