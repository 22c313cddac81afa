from __future__ import annotations

import os
from pathlib import Path

import pytest

from trireme.errors import ConfigurationError
from trireme.launch.run_directory import JobRecord, claim, claim_free, is_running, read_record

RECORD = JobRecord(
    job="j",
    state="running",
    status=None,
    host="h",
    launcher=77,
    pids={"worker:0": 78},
    coordinator="",
    secret_file="",
    command=("train.py", "--x"),
    options={"ps": 1},
    origins={"ps": "default"},
    started=1.0,
)


def test_one_launcher_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    assert not is_running(path)
    directory = claim(path)
    directory.write_record(RECORD)
    with pytest.raises(ConfigurationError, match=r"a job runs in .* already: end it .*--run-dir"):
        claim(path)
    assert is_running(path)
    directory.release()
    assert not is_running(path)
    claim(path).release()


def test_another_directory_is_found_where_jobs_run(tmp_path: Path) -> None:
    first, second = claim_free(tmp_path / "mnist"), claim_free(tmp_path / "mnist")
    assert (first.path.name, second.path.name) == ("mnist", "mnist-2")
    first.release()
    third = claim_free(tmp_path / "mnist")
    assert third.path.name == "mnist"
    second.release()
    third.release()


def test_record_and_secret_are_private_and_the_secret_goes(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    directory.write_secret("secret")
    directory.write_record(RECORD)
    for file in (directory.secret_file, tmp_path / "job.json"):
        assert file.stat().st_mode & 0o777 == 0o600
    assert read_record(tmp_path) == RECORD
    directory.release()
    assert not directory.secret_file.exists()
    assert read_record(tmp_path).state == "lost"  # its end was not recorded


def test_no_other_user_can_hold_the_lock(tmp_path: Path) -> None:
    claim(tmp_path).release()
    assert (tmp_path / "job.lock").stat().st_mode & 0o777 == 0o600
    (tmp_path / "job.lock").chmod(0o644)  # as earlier versions left it
    claim(tmp_path).release()
    assert (tmp_path / "job.lock").stat().st_mode & 0o777 == 0o600


def test_a_directory_that_a_file_has_replaced_can_be_released(tmp_path: Path) -> None:
    directory = claim(tmp_path / "run")
    directory.path.rename(tmp_path / "moved")
    directory.path.touch()
    directory.release()
    claim(tmp_path / "moved").release()


def test_what_a_killed_launcher_left_is_claimed_again(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    directory.lock.close()  # as the kernel does when a process dies
    again = claim(tmp_path)
    again.release()


def test_no_record_or_a_damaged_one_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no job was started in"):
        read_record(tmp_path)
    for damaged in (b"{", b'{"job": "v\xe6"}'):
        (tmp_path / "job.json").write_bytes(damaged)
        with pytest.raises(ConfigurationError, match=r"job.json cannot be read"):
            read_record(tmp_path)
    (tmp_path / "job.json").unlink()
    os.mkfifo(tmp_path / "job.json")
    with pytest.raises(ConfigurationError, match=r"job.json cannot be read: it is not a regular"):
        read_record(tmp_path)


def test_a_disk_that_is_full_at_the_start_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trireme.launch.run_directory.write_atomically", full)
    claimed = claim(tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"cannot be written: .*No space left.*--run-dir"):
        claimed.write_secret("secret")
    claimed.release()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--run-dir"):
        claim(tmp_path / "file" / "run")


def test_what_somebody_has_left_in_its_place_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attacker who could foresee the name would have the secret written where they like."""
    monkeypatch.setattr("trireme.files.secrets.token_hex", lambda size: "foreseen")
    claimed = claim(tmp_path / "run")
    trap = tmp_path / "elsewhere"
    (tmp_path / "run" / ".job.secret.foreseen").symlink_to(trap)
    with pytest.raises(ConfigurationError, match="File exists"):
        claimed.write_secret("00")
    assert not trap.exists()
    claimed.release()
