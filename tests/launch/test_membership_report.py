"""The file in which a coordinator tells its launcher who takes part."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.launch.programs import eventually
from trireme.launch.membership_report import (
    LostTask,
    MembershipReport,
    MembershipReportReader,
    MembershipReportWriter,
)

LOST = MembershipReport(joined=True, lost=(LostTask("worker:1", 7, "it sent nothing for 10.0 s"),))


def test_what_is_written_is_read_once(tmp_path: Path) -> None:
    reader = MembershipReportReader(tmp_path / "attendance")
    assert reader.news() is None
    with MembershipReportWriter(tmp_path / "attendance", lambda: LOST):
        pass  # its end writes the last word
    assert reader.news() == LOST
    assert reader.news() is None


def test_it_beats_although_nothing_changes(tmp_path: Path) -> None:
    reader = MembershipReportReader(tmp_path / "attendance")
    with MembershipReportWriter(tmp_path / "attendance", lambda: LOST):
        assert eventually(lambda: reader.news() is not None)
        assert eventually(lambda: reader.news() == LOST)


def test_what_cannot_be_read_is_no_news(tmp_path: Path) -> None:
    (tmp_path / "attendance").write_text("{")
    assert MembershipReportReader(tmp_path / "attendance").news() is None


def test_a_disk_that_takes_nothing_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [True]
    write = Path.write_bytes

    def refuse(path: Path, data: bytes) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    reader = MembershipReportReader(tmp_path / "attendance")
    with MembershipReportWriter(tmp_path / "attendance", lambda: LOST):
        full[0] = False
        assert eventually(lambda: reader.news() == LOST)
    assert os.listdir(tmp_path) == ["attendance"]


def test_it_beats_and_says_what_is_new_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [MembershipReport()]
    reader = MembershipReportReader(tmp_path / "attendance")
    with MembershipReportWriter(tmp_path / "attendance", lambda: told[0]):
        assert eventually(lambda: reader.news() == MembershipReport())

        def refuse(path: Path, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", refuse)
        told[0] = LOST
        assert eventually(lambda: reader.news() == LOST)
        assert eventually(lambda: reader.news() == LOST)  # and beats on


def test_it_comes_back_where_its_directory_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "run" / "attendance"
    reader = MembershipReportReader(path)
    with MembershipReportWriter(path, lambda: LOST):
        assert eventually(lambda: reader.news() == LOST)
        shutil.rmtree(path.parent)
        assert eventually(lambda: reader.news() == LOST)
