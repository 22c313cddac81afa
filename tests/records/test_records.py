"""Records on a full disk: nothing ends, no other error is hidden, and they go on afterwards."""

from __future__ import annotations

import errno
import json
import logging
import os
from io import FileIO
from pathlib import Path
from typing import IO, Any

import pytest

from trireme.errors import ConfigurationError
from trireme.records.records import Begin, Record, RecordWriter, read_starts

BEGIN = Begin(task="worker:0", job="job", time=1000.0, host="here", pid=1)


def record(second: float) -> Record:
    return Record(time=1000.0 + second, status={"step": int(second)})


class Disk:
    """Takes `room` bytes, and then no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: float = float("inf")
        disk = self

        class File:
            def __init__(self, file: IO[bytes]) -> None:
                self._file = file

            def write(self, data: bytes) -> int:
                if not disk.room:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                taken = data[: int(min(len(data), disk.room))]
                disk.room -= len(taken)
                self._file.write(taken)
                return len(taken)

            def close(self) -> None:
                self._file.close()
                if not disk.room:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def opened(*args: Any, **options: Any) -> Any:
            return File(FileIO(*args, **options))

        monkeypatch.setattr("trireme.records.records.FileIO", opened)


def test_records_survive_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch)
    writer = RecordWriter(tmp_path / "records", BEGIN)
    with caplog.at_level(logging.WARNING):
        writer.write(record(1))
        disk.room = 10.0  # the next line is cut short
        writer.write(record(2))
        writer.write(record(3))
        disk.room = float("inf")
        writer.write(record(4))
        writer.write(record(5))
        writer.close()
    (start,) = read_starts(tmp_path)
    assert [item.status["step"] for item in start.records] == [1, 4, 5]
    said = [r.getMessage() for r in caplog.records]
    assert said == [
        "worker:0 records nothing for now: [Errno 28] No space left on device",
        "worker:0 records again; 2 were lost",
    ]


def test_a_disk_that_is_full_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    disk.room = 20.0
    writer = RecordWriter(tmp_path / "records", BEGIN)
    writer.write(record(1))
    writer.write(record(2))
    disk.room = float("inf")
    writer.write(record(3))
    writer.close()
    (start,) = read_starts(tmp_path)
    assert start.begin == BEGIN
    assert [item.status["step"] for item in start.records] == [3]


def test_closing_hides_no_other_error(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "worker-0.jsonl").symlink_to("/dev/full")
    writer = RecordWriter(tmp_path / "records", BEGIN)
    writer.write(record(1))
    writer.close()
    writer.close()


def test_a_pipe_among_the_records_is_passed_by(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "records", BEGIN)
    writer.write(record(1))
    writer.close()
    os.mkfifo(tmp_path / "records" / "worker-1.jsonl")
    assert [start.begin.task for start in read_starts(tmp_path)] == ["worker:0"]


def test_a_pipe_in_the_place_of_its_own_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "worker-0.jsonl")
    RecordWriter(tmp_path, BEGIN).write(record(1))
    assert "worker:0 records nothing for now" in caplog.text


@pytest.mark.parametrize("name", ["worker:\u00b2", f"worker:{'9' * 5000}", "worker:", "\u0663"])
def test_any_name_of_a_task_has_a_place_in_the_order(tmp_path: Path, name: str) -> None:
    line = {"line": "begin", "task": name, "job": "job", "time": 1.0, "host": "h", "pid": 1}
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "worker-0.jsonl").write_text(json.dumps(line) + "\n")
    assert [start.begin.task for start in read_starts(tmp_path)] == [name]


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    RecordWriter(tmp_path / "records", BEGIN).write(record(1))
    monkeypatch.setattr("trireme.records.records.open_regular", denied)
    with pytest.raises(ConfigurationError, match=r"worker-0.jsonl cannot be read: .*denied"):
        read_starts(tmp_path)
