from __future__ import annotations

import os
from pathlib import Path

import pytest

from trireme.files import PRIVATE, is_locked, open_lock, open_regular, try_lock, write_atomically


def test_a_file_is_replaced_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new", PRIVATE)
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_replaced_stays(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomically(path, b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["directory"]


def test_one_open_file_at_a_time_has_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    one, other = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert try_lock(one)
    assert not try_lock(other)
    assert is_locked(path)
    os.close(one)
    assert not is_locked(path)
    assert try_lock(other)
    os.close(other)


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert not is_locked(path)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(path)
    with pytest.raises(OSError, match="No such device"):
        open_lock(str(path), os.O_WRONLY | os.O_CREAT)


def test_a_file_system_without_locks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(95, "Operation not supported")

    path = tmp_path / "lock"
    path.touch()
    monkeypatch.setattr("trireme.files.fcntl.flock", refuse)
    with path.open() as file, pytest.raises(OSError, match="not supported"):
        try_lock(file.fileno())
    assert not is_locked(path)
