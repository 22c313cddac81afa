"""What the checks of a host say of what is there."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from resource import RLIM_INFINITY
from types import SimpleNamespace
from typing import Any

import pytest

from trireme.doctor import checks
from trireme.doctor.checks import GIB, MIB
from trireme.launch.run_directory import claim
from trireme.session.checkpoint.run_lock import LocalLock, writer_here

NOW = datetime(2030, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
OWN = {"127.0.0.1", "10.0.0.5"}


def bad(found: Any) -> dict[str, str]:
    return {each.topic: each.level for each in found if each.level != "ok"}


@pytest.mark.parametrize(
    ("supports", "installed", "topic", "advice"),
    [
        (">=3.11", {"torch": "2.9.1+cpu", "msgspec": "0.20"}, None, ""),
        (">=9", {"torch": "2.9.1", "msgspec": "0.20"}, "python", "newer Python"),
        (">=3.11", {"torch": "2.9.0"}, "msgspec", "pip install 'msgspec>=0.20'"),
        (">=3.11", {"torch": "2.8", "msgspec": "1"}, "torch", "pip install 'torch<3,>=2.9'"),
    ],
    ids=["well", "python", "missing", "old"],
)
def test_versions(
    monkeypatch: pytest.MonkeyPatch,
    supports: str,
    installed: dict[str, str],
    topic: str | None,
    advice: str,
) -> None:
    requires = ["torch<3,>=2.9", "msgspec>=0.20", "ray>=2.40; extra == 'ray'"]
    package = SimpleNamespace(
        version="0.1.0", requires=requires, metadata={"Requires-Python": supports}
    )

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: package)
    monkeypatch.setattr("importlib.metadata.version", version)
    found = list(checks.check_versions())
    assert bad(found) == ({} if topic is None else {topic: "problem"})
    assert all(advice in each.advice for each in found if each.level != "ok")


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = SimpleNamespace(free=60 * MIB, total=64 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda directory: usage)
    monkeypatch.setattr(checks, "local_memory", lambda: None)
    found = list(checks.check_shared_memory(tmp_path))
    assert bad(found) == {"memfd": "warning", "/dev/shm": "warning"}
    assert found[1].finding.startswith("60.0 MiB free of 64.0 MiB")
    assert bad(checks.check_shared_memory(tmp_path / "none")) == {"memfd": "warning"}


def test_limits() -> None:
    files = [checks.check_files(each).level for each in (RLIM_INFINITY, 1024, 1023, 255)]
    assert files == ["ok", "ok", "warning", "problem"]


def test_what_the_environment_says() -> None:
    assert checks.check_environment({}).finding == "a program started here is a job of its own"
    wrong = checks.check_environment({"TF_CONFIG": "nonsense"})
    assert wrong.level == "problem" and "TF_CONFIG" in wrong.finding


@pytest.mark.parametrize(
    ("resolved", "own", "outward", "expected"),
    [
        (["10.0.0.5"], OWN, "10.0.0.5", {}),
        (["127.0.0.1", "127.0.1.1"], OWN, "", {"network": "warning"}),
        (["127.0.0.1"], OWN, "10.0.0.5", {"host name": "warning"}),
        ([], OWN, "10.0.0.5", {"host name": "warning"}),
        (["10.0.0.6"], OWN, "10.0.0.5", {"host name": "problem"}),
        (["10.0.0.5"], {"10.0.0.5"}, "10.0.0.5", {"loopback": "problem"}),
    ],
    ids=["well", "alone", "name is loopback", "no name", "another's name", "no loopback"],
)
def test_addresses(
    resolved: list[str], own: set[str], outward: str, expected: dict[str, str]
) -> None:
    found = list(checks.check_addresses("a", resolved, own, outward))
    assert bad(found) == expected
    assert all(each.advice for each in found if each.level != "ok")


def test_an_unknown_host_is_said() -> None:
    found = checks.check_task("ps:0", "no.such.host.invalid:1", 1.0)
    assert (found.topic, found.level) == ("ps:0 at no.such.host.invalid:1", "problem")
    assert "is not known here" in found.finding


def test_disk() -> None:
    levels = [checks.check_disk(free, Path("r")).level for free in (GIB, GIB - 1, 64 * MIB - 1)]
    assert levels == ["ok", "warning", "problem"]


def test_a_directory_that_does_not_exist_yet_is_looked_at_where_it_would_be(tmp_path: Path) -> None:
    found = {each.topic: each for each in checks.check_directory(tmp_path / "not" / "there")}
    assert found["run directory"].level == found["run lock"].level == "ok"
    assert not list(tmp_path.iterdir())


def test_a_disk_without_locks_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int) -> bool:
        raise OSError("no locks")

    monkeypatch.setattr(checks, "try_lock", no_locks)
    assert bad(checks.check_directory(tmp_path))["run directory"] == "warning"


def test_who_uses_a_directory_is_found(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    lock = LocalLock(tmp_path).claim(writer_here("worker:0", "by-hand", epoch="e", stop="kill me"))
    *_, used = checks.check_directory(tmp_path)
    assert used.level == "warning" and used.finding.startswith("worker:0 (process ")
    assert used.advice.endswith("kill me")
    lock.release()
    directory.release()
    *_, used = checks.check_directory(tmp_path)
    assert used.finding == "no job uses it"


def test_a_file_in_the_way_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert bad(checks.check_directory(tmp_path / "file" / "run"))["run directory"] == "problem"
