from __future__ import annotations

from pathlib import Path

import pytest

from trireme.atomic_file import PRIVATE, write_atomically


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
