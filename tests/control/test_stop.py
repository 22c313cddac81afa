"""`trireme stop` signals the launcher of the job in a directory, and no other process."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from tests.launch.test_run_directory import RECORD
from trireme.control.stop import main as stop
from trireme.control.stop import signal_launcher, wait_until_free
from trireme.errors import UsageError
from trireme.host import process_birth
from trireme.launch.run_directory import claim


def test_it_waits_for_the_launcher(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    assert not wait_until_free(tmp_path, 0.0)
    directory.release()
    assert wait_until_free(tmp_path, 0.0)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The signals that were sent; none is."""
    signals: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: signals.append(("pid", pid)))
    monkeypatch.setattr(os, "killpg", lambda pid, _: signals.append(("group", pid)))
    monkeypatch.setattr(
        signal, "pidfd_send_signal", lambda process, _: signals.append(("process", process))
    )
    return signals


@pytest.mark.parametrize("launcher", ["all", "group", "init", "own group", "parent", "too large"])
def test_only_the_holder_of_the_lock_is_stopped(
    tmp_path: Path, launcher: str, sent: list[tuple[str, int]]
) -> None:
    own, parent = os.getpid(), os.getppid()
    known = {"all": -1, "group": 0, "init": 1, "own group": -own, "parent": parent}
    pid = known.get(launcher, 2**31)
    directory = claim(tmp_path)
    forged = msgspec.structs.replace(RECORD, host=socket.gethostname(), launcher=pid)
    directory.write_record(forged)
    with pytest.raises(UsageError, match=rf"process {pid}, .*does not hold job\.lock"):
        stop([str(tmp_path)])
    assert sent == []
    directory.release()


def test_a_later_process_of_the_launchers_id_is_not_stopped(
    tmp_path: Path, sent: list[tuple[str, int]]
) -> None:
    directory, own = claim(tmp_path), os.getpid()
    born = msgspec.structs.replace(RECORD, launcher=own, launcher_birth="earlier")
    with pytest.raises(UsageError, match="names as its launcher"):
        signal_launcher(tmp_path, born, signal.SIGTERM)
    assert sent == []
    record = msgspec.structs.replace(born, launcher_birth=process_birth(own))
    signal_launcher(tmp_path, record, signal.SIGTERM)
    assert [kind for kind, _ in sent] == ["process"]
    directory.release()
    signal_launcher(tmp_path, born, signal.SIGTERM)  # it has just ended
