"""Who may write to a run directory: one job, one chief, and nobody who was stopped meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.clocks import VirtualClock
from tests.session.checkpoint.samples import sample
from trireme.errors import ConfigurationError
from trireme.process_birth import process_birth
from trireme.session.checkpoint import list_checkpoints, save
from trireme.session.checkpoint.places import LocalPlace
from trireme.session.checkpoint.run_lock import (
    WRITERS,
    LocalClaims,
    RunLock,
    Writer,
    writer_here,
)

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
    lock = RunLock.claim(LocalClaims(tmp_path), writer(pid=other_process.pid))
    with pytest.raises(ConfigurationError) as refused:
        RunLock.claim(LocalClaims(tmp_path), writer(epoch="two"))
    said = str(refused.value)
    assert f"worker:0 (process {other_process.pid} on " in said
    assert ", since 20" in said
    assert "`trireme stop runs/first`" in said
    assert lock.held
    lock.release()
    RunLock.claim(LocalClaims(tmp_path), writer(epoch="two")).release()


def test_a_second_session_of_one_program_is_told_that_it_is_the_program_itself(
    tmp_path: Path,
) -> None:
    lock = RunLock.claim(LocalClaims(tmp_path), writer())
    with pytest.raises(ConfigurationError, match="this program itself writes"):
        RunLock.claim(LocalClaims(tmp_path), writer(epoch="two"))
    lock.release()


def test_a_later_chief_of_the_same_job_takes_over_and_an_earlier_one_does_not(
    tmp_path: Path,
) -> None:
    first = RunLock.claim(LocalClaims(tmp_path), writer("worker:0", view=1))
    second = RunLock.claim(LocalClaims(tmp_path), writer("worker:1", view=2), first=False)
    assert second.held
    assert not first.held
    with pytest.raises(ConfigurationError):
        RunLock.claim(LocalClaims(tmp_path), writer("worker:0", view=1), first=False)
    first.release()
    assert second.held
    with pytest.raises(ConfigurationError):  # the lock of today, not the one that was given back
        RunLock.claim(LocalClaims(tmp_path), writer(epoch="two"))
    second.release()


def test_a_chief_that_has_gone_lets_the_next_one_in(
    tmp_path: Path, other_process: subprocess.Popen[bytes]
) -> None:
    lock = RunLock.claim(LocalClaims(tmp_path), writer(pid=other_process.pid))
    lock._claims._files[1].close()  # type: ignore[attr-defined]  # as the kernel does
    RunLock.claim(LocalClaims(tmp_path), writer("worker:1", epoch="two")).release()


def test_a_job_does_not_take_back_what_another_has_taken_since(tmp_path: Path) -> None:
    RunLock.claim(LocalClaims(tmp_path), writer(epoch="one")).release()
    RunLock.claim(LocalClaims(tmp_path), writer(epoch="two")).release()
    with pytest.raises(ConfigurationError):
        RunLock.claim(LocalClaims(tmp_path), writer("worker:1", epoch="one", view=2), first=False)
    last = LocalClaims(tmp_path).newest()[1]
    assert last is not None
    young = writer("worker:1", epoch="one", view=2, began=last.since + 1)
    RunLock.claim(LocalClaims(tmp_path), young, first=False).release()


def test_a_lock_whose_holder_has_ended_is_waited_for_and_then_named(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock = RunLock.claim(LocalClaims(tmp_path), writer(pid=ended.pid))

    class Impatient(VirtualClock):
        def now(self) -> float:
            self.advance(3.0)
            return super().now()

    with pytest.raises(ConfigurationError, match="has ended, but its lock is still held"):
        RunLock.claim(LocalClaims(tmp_path), writer(epoch="two"), clock=Impatient())
    lock.release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = RunLock.claim(LocalClaims(tmp_path), writer())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        os.write(writing, b"x")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"x"
        lock.release()
        RunLock.claim(LocalClaims(tmp_path), writer(epoch="two")).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_lock_file_that_is_gone_or_damaged_is_no_right_to_write(tmp_path: Path) -> None:
    lock = RunLock.claim(LocalClaims(tmp_path), writer())
    for damaged in (b'{"host": "v\xe6"}', b"{"):
        (tmp_path / WRITERS / "000001" / "writer.json").write_bytes(damaged)
        assert not lock.held
    shutil.rmtree(tmp_path / WRITERS)
    assert not lock.held
    again = RunLock.claim(LocalClaims(tmp_path), writer(), first=False)
    assert again.held
    again.release()


def test_without_locks_it_goes_by_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_process: subprocess.Popen[bytes]
) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("trireme.file_lock.fcntl.flock", refuse)
    lock = RunLock.claim(LocalClaims(tmp_path), writer(pid=other_process.pid))
    with pytest.raises(ConfigurationError, match=str(other_process.pid)):
        RunLock.claim(LocalClaims(tmp_path), writer(epoch="two"))
    lock.release()
    RunLock.claim(LocalClaims(tmp_path), writer(epoch="two", pid=other_process.pid))
    other_process.kill()
    other_process.wait()
    RunLock.claim(LocalClaims(tmp_path), writer(epoch="three")).release()


def test_a_step_of_the_clock_makes_no_other_process_of_a_writer(
    monkeypatch: pytest.MonkeyPatch, other_process: subprocess.Popen[bytes]
) -> None:
    own = writer(pid=other_process.pid)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: own.since + 3600.0)
    assert not own.gone
    assert writer(pid=other_process.pid, birth=f"{own.birth}0").gone  # a later one of this id


def test_no_other_user_can_hold_the_lock(tmp_path: Path) -> None:
    lock = RunLock.claim(LocalClaims(tmp_path), writer())
    (file,) = (tmp_path / WRITERS).glob("*/writer.json")
    assert file.stat().st_mode & 0o777 == 0o600
    lock.release()


def test_this_process_knows_when_it_began() -> None:
    assert writer().began == psutil.Process().create_time()


def test_a_claim_is_above_the_writers_of_checkpoints_that_were_put_there(tmp_path: Path) -> None:
    save(tmp_path, sample(9), writer=7)
    place = LocalPlace(tmp_path)
    lock = place.claim(writer())
    path = save(place, sample(3), writer=lock.number)
    lock.release()
    assert path.name == "step-000000003-writer-8"
    assert list_checkpoints(tmp_path)[-1] == path
