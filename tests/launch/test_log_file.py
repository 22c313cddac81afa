"""A task's output in a file, on a disk that may be full."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trireme.launch.output import LogFile


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: the nearest to a full disk that needs no other one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_lines_are_appended(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    log = LogFile(tmp_path / "log", pytest.fail)
    log.write(b"one")
    log.write(b"two")
    log.close()
    assert (tmp_path / "log").read_text() == "before\none\ntwo\n"


def test_a_log_that_has_grown_is_renamed_in_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    path.write_text("before\n")
    log = LogFile(path, pytest.fail, most=20)
    for line in range(12):
        log.write(b"line %02d" % line)
    log.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["worker-0.log", "worker-0.log.1"]
    assert path.read_text() == "line 11\n"
    assert (tmp_path / "worker-0.log.1").read_text() == "line 09\nline 10\n"


def test_what_a_full_disk_does_not_take_is_counted_and_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    log = LogFile(tmp_path / "log", said.append)
    with full_at(10):
        for _ in range(5):
            log.write(b"1234567")
    log.write(b"again")
    log.write(b"on")
    log.close()
    (complaint,) = said
    assert f"{tmp_path / 'log'} cannot be written (File too large)" in complaint
    text = (tmp_path / "log").read_text()
    assert text.startswith("1234567\n12")
    assert text.endswith("[trireme: 4 lines could not be written here]\nagain\non\n")


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    os.mkfifo(tmp_path / "log")
    log = LogFile(tmp_path / "log", said.append)
    log.write(b"nobody reads this")
    assert len(said) == 1
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    for _ in range(3):
        log.write(b"x" * (1 << 16))  # more than a pipe holds
    log.close()
    assert b"2 lines could not be written" in os.read(reader, 100)
    os.close(reader)


def test_a_directory_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    log = LogFile(tmp_path / "gone" / "log", said.append)
    log.write(b"one")
    log.close()
    assert len(said) == 1


def test_a_launcher_outlives_a_full_disk(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from tests.launch.programs import run_programs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
ran = run_programs(Path(sys.argv[1]), {"worker:0": "[print('x' * 99) for _ in range(200)]"})
print(ran.status, ran.out.count("x" * 99), ran.err)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.startswith("0 200 "), ended.stdout + ended.stderr
    assert ended.stdout.count("cannot be written (File too large)") == 1
    assert "finished in" in ended.stdout
