"""What `trireme status` shows of a job that is over."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.cli.test_commands import FINISHED
from trireme.cli import main
from trireme.cluster.messages import ClusterStatus, TaskStatus
from trireme.launch.run_directory import claim
from trireme.monitor.recording import records_directory
from trireme.records.records import Begin, Record, RecordWriter


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_status_of_a_job_that_is_over_tells_what_happened_to_it(capsys) -> None:
    claimed = claim(Path("run"))
    claimed.write_record(
        msgspec.structs.replace(
            FINISHED,
            state="failed",
            status=1,
            failure=("the job failed after 9.0 s. First ps:0 was killed", "  what to do: this"),
            events=tuple((float(at), f"event {at}") for at in range(10)),
        )
    )
    claimed.release()
    assert main(["status", "run"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[2:6] == [
        "the job failed after 9.0 s. First ps:0 was killed",
        "what to do: this",
        "2 older events: see --json",
        "after 2.0 s: event 2",
    ]
    assert lines[12] == "after 9.0 s: event 9"


@pytest.mark.parametrize("state", ["finished", "failed", "interrupted"])
def test_a_task_of_a_job_that_is_over_is_in_no_state(capsys, state: str) -> None:
    claimed = claim(Path("run"))
    claimed.write_record(msgspec.structs.replace(FINISHED, state=state, pids={"worker:0": 1}))
    claimed.release()
    begin = Begin(task="worker:0", job="abc", time=1.0, host="here", pid=1)
    writer = RecordWriter(records_directory(Path("run")), begin)
    writer.write(Record(time=2.0, status={"state": "training", "step": 3}), due=True)
    writer.close()
    assert main(["status", "run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("last recorded: step 3")


def test_the_status_of_a_worker_says_that_it_makes_no_step_now(capsys) -> None:
    claimed = claim(Path("run"))
    claimed.write_record(msgspec.structs.replace(FINISHED, pids={"worker:0": 1}))
    claimed.release()
    begin = Begin(task="worker:0", job="abc", time=1.0, host="here", pid=1)
    writer = RecordWriter(records_directory(Path("run")), begin)
    writer.write(Record(time=2.0, status={"step": 3, "excuse": "it saves"}), due=True)
    writer.close()
    assert main(["status", "run"]) == 0
    assert "step 3, makes no step now: it saves" in capsys.readouterr().out


def test_a_worker_that_left_waits_for_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"state": "waits", "excuse": "it waits for other tasks", "step": 7}
    live, left = (
        TaskStatus("worker", index, state, "", 1, "here", 9 + index, "", 0.1, dict(told))
        for index, state in enumerate(("live", "left"))
    )
    status = ClusterStatus("running", "a worker left", 2, (), (live, left))
    monkeypatch.setattr("trireme.screen.status.query", lambda record: status)
    claimed = claim(Path("run"))
    running = msgspec.structs.replace(
        FINISHED, state="running", ended=None, coordinator="tcp://h:1"
    )
    claimed.write_record(running)
    try:
        assert main(["status", "run"]) == 0
    finally:
        claimed.release()
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert "makes no step now: it waits for other tasks" in first
    assert second.split("left")[1].strip() == "step 7"
