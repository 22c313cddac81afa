"""What the checks of a run directory say of what was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trireme.doctor.check import GIB, MIB
from trireme.doctor.probes import find_directory
from trireme.doctor.run_directory import DirectoryFacts, check_directory
from trireme.launch.run_directory import claim
from trireme.session.checkpoint.run_lock import RunLock, writer_here

WELL = DirectoryFacts("RUN", 2 * GIB, 4 * GIB)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ("ok", "ok", "ok")),
        ({"free": GIB - 1}, ("warning", "ok", "ok")),
        ({"free": 64 * MIB - 1}, ("problem", "ok", "ok")),
        ({"failure": "Permission denied"}, ("ok", "problem", "ok")),
        ({"locks": False}, ("ok", "warning", "ok")),
        ({"job": "job 1", "writer": "worker:0"}, ("ok", "ok", "ok")),
        ({"writer": "worker:0"}, ("ok", "ok", "warning")),
        ({"job": "job 1", "writer": "worker:0", "stopped": True}, ("ok", "ok", "problem")),
    ],
    ids=str,
)
def test_checks(change: dict[str, object], expected: tuple[str, ...]) -> None:
    checks = check_directory(replace(WELL, **change))  # type: ignore[arg-type]
    assert tuple(check.level for check in checks) == expected


def test_a_directory_that_does_not_exist_yet_is_looked_at_where_it_would_be(tmp_path: Path) -> None:
    facts = find_directory(tmp_path / "not" / "there")
    assert (facts.failure, facts.job, facts.writer) == ("", "", "")
    assert facts.locks and facts.total >= facts.free > 0
    assert not list(tmp_path.iterdir())


def test_who_uses_a_directory_is_found(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    lock = RunLock.claim(tmp_path, writer_here("worker:0", "by-hand", epoch="e", stop="kill me"))
    facts = find_directory(tmp_path)
    assert facts.job == ""  # it has no record yet
    assert facts.writer.startswith("worker:0 (process ")
    assert (facts.stop, facts.stopped) == ("kill me", False)
    lock.release()
    directory.release()
    assert find_directory(tmp_path).writer == ""


def test_a_file_in_the_way_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert find_directory(tmp_path / "file" / "run").failure
