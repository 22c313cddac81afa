from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trireme.launch import output
from trireme.launch.output import BackgroundConsole, Console
from trireme.launch.process import LINE_BYTES, Pipe


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_where_nobody_looks() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err, {})
    console.line("ps:0", "one", False)
    console.line("ps:0", "two", True)
    console.say("three", alarm=True)
    assert out.getvalue() == "ps:0 | one\n"
    assert err.getvalue() == "ps:0 | two\ntrireme: three\n"


def test_each_task_has_its_colour_on_a_terminal() -> None:
    out = Terminal()
    console = Console(out, io.StringIO(), {})
    for name in ("ps:0", "worker:0", "ps:0"):
        console.line(name, "x", False)
    first, second, third = out.getvalue().splitlines()
    assert first == third == "\x1b[36mps:0 |\x1b[0m x"
    assert second == "\x1b[33mworker:0 |\x1b[0m x"


def test_colour_can_be_refused() -> None:
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        out = Terminal()
        Console(out, out, environ).line("ps:0", "x", False)
        assert out.getvalue() == "ps:0 | x\n"


def test_a_reader_that_went_away_does_not_end_the_job() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    err = io.StringIO()
    with os.fdopen(writer, "w") as out:
        console = Console(out, err, {})
        console.line("ps:0", "x", False)
        console.line("ps:0", "y", False)
        console.say("still here")
    assert err.getvalue() == "trireme: still here\n"


def test_a_full_disk_under_one_stream_is_said_at_the_other(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from trireme.launch.output import BackgroundConsole, Console
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
console = Console(sys.stdout, sys.stderr, {})
for number in range(50):
    console.line("worker:0", f"line {number}", False)
console.say("finished")
"""
    with (tmp_path / "out").open("w") as out:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert ended.returncode == 0
    first, second = ended.stderr.splitlines()
    assert "output cannot be written (File too large)" in first
    assert second == "trireme: finished"


def test_in_the_background_all_is_written_before_the_end_and_in_order() -> None:
    code = """
import sys
from trireme.launch.output import BackgroundConsole
with BackgroundConsole(sys.stdout, sys.stderr, {}) as console:
    for number in range(10000):
        console.line("worker:0", f"line {number} caf\\u00e9", number % 2 == 0)
    console.say("finished")
"""
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        env=environ,
    )
    *lines, last = ended.stdout.splitlines()
    assert lines == [f"worker:0 | line {number} caf?" for number in range(10000)]
    assert last == "trireme: finished"
    assert ended.returncode == 0


def test_in_the_background_a_full_disk_under_one_stream_is_said_at_the_other(
    tmp_path: Path,
) -> None:
    code = """
import resource, signal, sys
from trireme.launch.output import BackgroundConsole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
with BackgroundConsole(sys.stdout, sys.stderr, {}) as console:
    for number in range(50):
        console.line("worker:0", f"line {number}", False)
"""
    with (tmp_path / "out").open("w") as out:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert ended.returncode == 0
    (line,) = ended.stderr.splitlines()
    assert "output cannot be written (File too large)" in line


def test_streams_of_the_program_itself_take_lines_of_the_background() -> None:
    out = io.StringIO()
    with BackgroundConsole(out, out, {}) as console:
        console.line("ps:0", "one", False)
        console.say("two")
    assert out.getvalue() == "ps:0 | one\ntrireme: two\n"


def test_lines_that_are_not_taken_are_counted_where_they_would_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "_WAITING", 10)
    monkeypatch.setattr(output, "_STALLED_SECONDS", 0.01)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as out, os.fdopen(reader) as read:
        fill(out.fileno())
        with BackgroundConsole(out, io.StringIO(), {}) as console:
            for number in range(1000):
                console.line("ps:0", str(number), False)
            os.read(reader, 1 << 20)
        out.close()
        *shown, note = read.read().splitlines()
    assert 10 <= len(shown) <= 11  # one may be on its way
    assert shown == [f"ps:0 | {number}" for number in range(len(shown))]
    assert f"{1000 - len(shown)} lines are not shown" in note


def fill(descriptor: int) -> None:
    """Fills a pipe."""
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(descriptor, bytes(1 << 16))
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(descriptor, b"\0")
    os.set_blocking(descriptor, True)


@contextlib.contextmanager
def pipe() -> Iterator[tuple[Pipe, int, list[bytes]]]:
    """A pipe, the descriptor that writes into it, and the lines that were read from it."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    lines: list[bytes] = []
    with os.fdopen(reader, "rb") as stream:
        yield Pipe(stream, lines.append), writer, lines


def test_lines_across_chunks() -> None:
    with pipe() as (read, writer, lines):
        assert read.read() is None
        os.write(writer, b"on")
        assert (read.read(), lines) == (2, [])
        os.write(writer, b"e\ntwo\r\nth")
        read.read()
        assert lines == [b"one", b"two"]
        os.close(writer)
        assert read.read() == 0
        read.close()
        assert lines == [b"one", b"two", b"th"]


def test_of_a_progress_bar_the_last_state_is_shown() -> None:
    with pipe() as (read, writer, lines):
        os.write(writer, b"1%\r2%\r3%")
        read.read()
        assert lines == []
        os.write(writer, b"\r4%\n")
        read.read()
        assert lines == [b"4%"]
        read.partial = b"9%\r" * LINE_BYTES
        os.write(writer, b"9%\r")
        read.read()
        assert len(read.partial) <= LINE_BYTES
        os.close(writer)


def test_what_the_encoding_lacks_is_replaced() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Console(out, out, {}).line("ps:0", "caf\u00e9", False)
    assert raw.getvalue() == b"ps:0 | caf?\n"
