from __future__ import annotations

import os
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trireme.certificates import Certificates
from trireme.cli import main
from trireme.errors import ConfigurationError
from trireme.tls import authority as authority_module
from trireme.tls.authority import read_facts
from trireme.tls.directory import read_certificate
from trireme.tls.transport import ssl_context


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def certs(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `trireme certs`; returns its status and what it has printed."""

    def run(*words: object) -> tuple[int, str, str]:
        status = main(["certs", *map(str, words)])
        return status, *capsys.readouterr()

    return run


Certs = Callable[..., tuple[int, str, str]]


def test_from_nothing_to_two_tasks(certs: Certs, here: Path) -> None:
    status, out, _ = certs("init", "c")
    assert status == 0
    assert "ca.key stays here" in out and "trireme certs issue c --task" in out
    status, out, _ = certs("issue", "c", "--task", "ps:0", "--task=worker:3", "--task", "ps:0")
    assert status == 0
    assert "c/ps-0.pem: for ps:0 and coordinator:0\n" in out
    assert "c/worker-3.pem: for worker:3\n" in out
    assert "Copy each to the host of its task, with c/job.secret" in out and "--certs" in out
    for file in (here / "c").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE((here / "c").stat().st_mode) == 0o700
    for task in ("ps:0", "worker:3"):
        pem = read_certificate(here / "c", task)
        assert all(ssl_context(Certificates(pem), server_side=side) for side in (False, True))
        assert (here / "c" / "ca.key").read_text() not in pem
    status, out, _ = certs("show", "c")
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["ca.pem", "the"],
        ["ps-0.pem", "ps:0"],
        ["worker-3.pem", "worker:3"],
    ]
    assert "PRIVATE" not in out


def test_nothing_is_overwritten(certs: Certs, here: Path) -> None:
    certs("init", "c")
    certs("issue", "c", "--task", "ps:0")
    before = {file.name: file.read_bytes() for file in (here / "c").iterdir()}
    for words in (("init", "c"), ("issue", "c", "--task", "worker:0", "--task", "ps:0")):
        status, _, err = certs(*words)
        assert status == 2
        assert "exists already and is kept: remove it first" in err
    assert {file.name: file.read_bytes() for file in (here / "c").iterdir()} == before


def test_the_umask_makes_no_difference(certs: Certs, here: Path) -> None:
    old = os.umask(0)
    try:
        certs("init", "c")
    finally:
        os.umask(old)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (here / "c").iterdir()} == {0o600}


def test_days(certs: Certs, here: Path) -> None:
    certs("init", "c", "--days", "30")
    status, _, _ = certs("issue", "c", "--task", "ps:0", "--days", "2")
    assert status == 0
    facts = read_facts((here / "c" / "ps-0.pem").read_text())
    assert facts.tasks == ("ps:0", "coordinator:0")
    now = datetime.now(UTC)
    assert timedelta(days=1.9) < facts.end - now < timedelta(days=2)
    assert "ps-0.pem  ps:0 and coordinator:0  until" in certs("show", "c")[1]
    status, _, err = certs("issue", "c", "--task", "ps:1", "--days", "31")
    assert status == 2 and "the authority ends on" in err
    assert not (here / "c" / "ps-1.pem").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("isue", "c"), "invalid choice: 'isue'"),
        (("issue", "c"), "name the tasks"),
        (("issue", "c", "--task", "chief:0"), "the roles are coordinator, ps, worker"),
        (("issue", "c", "--task", "worker:01"), "'worker:01' is no task"),
        (("issue", "c", "--task", "../x:0"), "is no task"),
        (("issue", "c", "--task", "ps:0", "--days", "0"), "a number above 0"),
        (("issue", "c", "--task", "ps:0", "--days", "nan"), "a number above 0"),
        (("issue", "elsewhere", "--task", "ps:0"), "make one with `trireme certs init elsewhere`"),
        (("show", "elsewhere"), "there is no certificate in elsewhere"),
        (("show", "empty"), "there is no certificate in empty"),
        (("init", "file/c"), "cannot be made"),
    ],
)
def test_what_cannot_be_is_one_line(
    certs: Certs, here: Path, words: tuple[str, ...], message: str
) -> None:
    certs("init", "c")
    (here / "empty").mkdir()
    (here / "file").touch()
    status, _, err = certs(*words)
    assert status == 2
    assert message in err and err.count("\n") == 1


def test_damaged_files_are_named(certs: Certs, here: Path) -> None:
    certs("init", "c")
    (here / "c" / "ps-0.pem").write_text("nonsense")
    (here / "c" / "ps-0.pem").chmod(0o600)
    status, out, _ = certs("show", "c")
    assert status == 1 and "ps-0.pem  DAMAGED" in out
    (here / "c" / "ca.key").write_text((here / "c" / "ca.key").read_text().replace("M", "N"))
    status, _, err = certs("issue", "c", "--task", "ps:1")
    assert status == 2 and "authority" in err


def test_the_key_of_another_authority(certs: Certs, here: Path) -> None:
    certs("init", "c")
    certs("init", "d")
    (here / "d" / "ca.key").replace(here / "c" / "ca.key")
    status, _, err = certs("issue", "c", "--task", "ps:1")
    assert status == 2 and "the authority's key is not that of its certificate" in err


def test_a_key_that_others_can_read_is_not_used(certs: Certs, here: Path) -> None:
    certs("init", "c")
    (here / "c" / "ca.key").chmod(0o640)
    status, _, err = certs("issue", "c", "--task", "ps:1")
    assert status == 2 and "the authority's key in c/ca.key can be read by other users" in err


def test_dates(certs: Certs, here: Path, caplog: pytest.LogCaptureFixture) -> None:
    certs("init", "c")
    certs("issue", "c", "--task", "ps:0", "--days", "10")
    now = datetime.now(UTC)
    read_certificate(here / "c", "ps:0", now)
    assert not caplog.text
    read_certificate(here / "c", "ps:0", now + timedelta(days=4))
    assert "ends on" in caplog.text and "--task ps:0" in caplog.text
    with pytest.raises(ConfigurationError, match=r"expired on .*: issue it again with `trireme"):
        read_certificate(here / "c", "ps:0", now + timedelta(days=11))
    with pytest.raises(ConfigurationError, match=r"is valid from .*: check this host's clock"):
        read_certificate(here / "c", "ps:0", now - timedelta(days=1))


def test_an_expired_certificate_is_shown_as_such(
    certs: Certs, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(authority_module, "_now", lambda: datetime.now(UTC) - timedelta(days=9))
        certs("init", "c", "--days", "5")
    status, out, _ = certs("show", "c")
    assert status == 1
    assert "NOT VALID: it expired on" in out
