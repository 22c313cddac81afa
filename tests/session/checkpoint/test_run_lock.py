"""Who may write to a run directory: one job, one chief, and nobody who was stopped meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.session.checkpoint.samples import sample
from trireme.errors import ConfigurationError
from trireme.host import process_birth
from trireme.session.checkpoint import list_checkpoints, save
from trireme.session.checkpoint.place import LocalPlace
from trireme.session.checkpoint.run_lock import WRITERS, LocalLock, Writer, writer_here

ROOT = Path(__file__).resolve().parents[2]


def writer(task: str = "worker:0", epoch: str = "one", view: int = 1, **fields: object) -> Writer:
    made = writer_here(task, "job", epoch=epoch, stop="trireme stop runs/first")
    birth = process_birth(int(str(fields.get("pid", made.pid))))
    return msgspec.structs.replace(made, **({"view": view, "birth": birth} | fields))


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_another_job_is_refused_and_told_by_whom(
    tmp_path: Path, other_process: subprocess.Popen[bytes]
) -> None:
    lock = LocalLock(tmp_path).claim(writer(pid=other_process.pid))
    with pytest.raises(ConfigurationError) as refused:
        LocalLock(tmp_path).claim(writer(epoch="two"))
    said = str(refused.value)
    assert f"worker:0 (process {other_process.pid} on " in said
    assert ", since 20" in said
    assert "`trireme stop runs/first`" in said
    assert lock.held
    lock.release()
    LocalLock(tmp_path).claim(writer(epoch="two")).release()


def test_a_second_session_of_one_program_is_told_that_it_is_the_program_itself(
    tmp_path: Path,
) -> None:
    lock = LocalLock(tmp_path).claim(writer())
    with pytest.raises(ConfigurationError, match="this program itself writes"):
        LocalLock(tmp_path).claim(writer(epoch="two"))
    lock.release()


def test_a_later_chief_of_the_same_job_takes_over_and_an_earlier_one_does_not(
    tmp_path: Path,
) -> None:
    first = LocalLock(tmp_path).claim(writer("worker:0", view=1))
    second = LocalLock(tmp_path).claim(writer("worker:1", view=2), first=False)
    assert second.held
    assert not first.held
    with pytest.raises(ConfigurationError):
        LocalLock(tmp_path).claim(writer("worker:0", view=1), first=False)
    first.release()
    assert second.held
    with pytest.raises(ConfigurationError):  # the lock of today, not the one that was given back
        LocalLock(tmp_path).claim(writer(epoch="two"))
    second.release()


def test_a_chief_that_has_gone_lets_the_next_one_in(
    tmp_path: Path, other_process: subprocess.Popen[bytes]
) -> None:
    lock = LocalLock(tmp_path).claim(writer(pid=other_process.pid))
    assert lock._file is not None
    lock._file.close()  # as the kernel does
    LocalLock(tmp_path).claim(writer("worker:1", epoch="two")).release()


def test_a_job_does_not_take_back_what_another_has_taken_since(tmp_path: Path) -> None:
    LocalLock(tmp_path).claim(writer(epoch="one")).release()
    LocalLock(tmp_path).claim(writer(epoch="two")).release()
    with pytest.raises(ConfigurationError):
        LocalLock(tmp_path).claim(writer("worker:1", epoch="one", view=2), first=False)


def test_a_lock_whose_holder_has_ended_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock = LocalLock(tmp_path).claim(writer(pid=ended.pid))

    monkeypatch.setattr("trireme.session.checkpoint.run_lock._DYING_SECONDS", 0.1)
    with pytest.raises(ConfigurationError, match="it has ended, but a process that it has started"):
        LocalLock(tmp_path).claim(writer(epoch="two"))
    lock.release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = LocalLock(tmp_path).claim(writer())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        os.write(writing, b"x")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"x"
        lock.release()
        LocalLock(tmp_path).claim(writer(epoch="two")).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_lock_file_that_is_gone_is_no_right_to_write(tmp_path: Path) -> None:
    lock = LocalLock(tmp_path).claim(writer())
    shutil.rmtree(tmp_path / WRITERS)
    assert not lock.held
    again = LocalLock(tmp_path).claim(writer(), first=False)
    assert again.held
    again.release()


def test_without_locks_it_goes_by_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_process: subprocess.Popen[bytes]
) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("trireme.files.fcntl.flock", refuse)
    lock = LocalLock(tmp_path).claim(writer(pid=other_process.pid))
    with pytest.raises(ConfigurationError, match=str(other_process.pid)):
        LocalLock(tmp_path).claim(writer(epoch="two"))
    lock.release()
    LocalLock(tmp_path).claim(writer(epoch="two", pid=other_process.pid))
    other_process.kill()
    other_process.wait()
    LocalLock(tmp_path).claim(writer(epoch="three")).release()


def test_a_step_of_the_clock_makes_no_other_process_of_a_writer(
    monkeypatch: pytest.MonkeyPatch, other_process: subprocess.Popen[bytes]
) -> None:
    own = writer(pid=other_process.pid)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: own.since + 3600.0)
    assert not own.gone
    assert writer(pid=other_process.pid, birth=f"{own.birth}0").gone  # a later one of this id


def test_a_pipe_in_the_place_of_an_entry_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / WRITERS / "000007").mkdir(parents=True)
    os.mkfifo(tmp_path / WRITERS / "000007" / "writer.json")
    assert LocalLock(tmp_path).newest() == (7, None)


@pytest.mark.parametrize("wrong", [{"pid": -1}, {"pid": 2**63}, {"since": 1e308}])
def test_an_entry_of_no_process_or_time_names_nobody(wrong: dict[str, Any], tmp_path: Path) -> None:
    content = msgspec.to_builtins(writer()) | wrong
    (tmp_path / WRITERS / "000007").mkdir(parents=True)
    (tmp_path / WRITERS / "000007" / "writer.json").write_bytes(msgspec.json.encode(content))
    assert LocalLock(tmp_path).newest() == (7, None)


def test_no_other_user_can_hold_the_lock(tmp_path: Path) -> None:
    lock = LocalLock(tmp_path).claim(writer())
    (file,) = (tmp_path / WRITERS).glob("*/writer.json")
    assert file.stat().st_mode & 0o777 == 0o600
    lock.release()


def test_a_claim_is_above_the_writers_of_checkpoints_that_were_put_there(tmp_path: Path) -> None:
    save(tmp_path, sample(9), writer=7)
    place = LocalPlace(tmp_path)
    lock = place.claim(writer())
    path = save(place, sample(3), writer=lock.number)
    lock.release()
    assert path.name == "step-000000003-writer-8"
    assert list_checkpoints(tmp_path)[-1] == path


@pytest.mark.parametrize(
    "name", ["20261128193000", "7", "0000000007", "\u0660" * 5 + "\u0667", "latest"]
)
def test_what_has_no_name_of_an_entry_counts_for_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / WRITERS / name).mkdir(parents=True)
    place = LocalPlace(tmp_path)
    lock = place.claim(writer())
    assert lock.number == 1 and lock.held
    path = save(place, sample(3), writer=lock.number)
    assert list_checkpoints(tmp_path) == [path]
    lock.release()


def test_after_the_last_number_a_claim_is_refused_and_says_why(tmp_path: Path) -> None:
    path = save(tmp_path, sample(9), writer=7)
    path.rename(path.with_name("step-000000009-writer-999999999"))
    with pytest.raises(ConfigurationError, match="has the last number, 999999999"):
        LocalPlace(tmp_path).claim(writer())
