"""Lines that a thread writes, to a stream that takes them, or takes none for a while."""

from __future__ import annotations

import io
import threading
import time

import pytest

from tests.conformance import PATIENCE
from trireme.launch import line_writer
from trireme.launch.line_writer import LineWriter


class Stream(io.StringIO):
    """A stream that takes nothing while it is held; `reached` is set at each attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.open = threading.Event()

    def take(self, text: str) -> None:
        self.reached.set()
        assert self.open.wait(PATIENCE)
        self.write(f"{text}\n")

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


def writer_of(stream: Stream) -> LineWriter:
    return LineWriter(lambda _, text: stream.take(text), "lines", lambda many: f"{many} dropped")


def test_all_lines_are_written_in_their_order_before_the_end() -> None:
    stream, other = Stream(), Stream()
    both = {id(stream): stream, id(other): stream}
    writer = LineWriter(lambda to, text: both[id(to)].take(text), "lines", str)
    stream.open.set()
    for number in range(30_000):
        writer.put(stream if number % 3 else other, f"line {number} {'.' * 100}")
    writer.close()
    assert [line.split()[1] for line in stream.lines] == [str(n) for n in range(30_000)]


def test_who_writes_to_a_stream_that_takes_nothing_waits_once_and_not_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line_writer, "_MOST", 1000)
    stream = Stream()
    writer = writer_of(stream)
    writer.put(stream, "first")
    assert stream.reached.wait(PATIENCE)
    began = time.monotonic()
    for number in range(2000):
        writer.put(stream, f"{number:010}")
    assert time.monotonic() - began < 10 * line_writer._STALLED_SECONDS
    stream.open.set()
    writer.close()
    assert stream.lines == ["first", *(f"{number:010}" for number in range(100)), "1900 dropped"]


def test_after_a_while_lines_are_shown_again_and_the_note_stands_where_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line_writer, "_MOST", 1000)
    monkeypatch.setattr(line_writer, "_STALLED_SECONDS", 0.01)
    stream = Stream()
    writer = writer_of(stream)
    writer.put(stream, "first")
    assert stream.reached.wait(PATIENCE)
    for number in range(150):
        writer.put(stream, f"{number:010}")
    stream.open.set()
    with writer._changed:
        assert writer._changed.wait_for(lambda: not writer._lines, PATIENCE)
    writer.put(stream, "later")
    writer.close()
    assert stream.lines[-3:] == ["0000000099", "50 dropped", "later"]


def test_the_end_gives_up_a_stream_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_writer, "_END_SECONDS", 0.05)
    stream = Stream()
    writer = writer_of(stream)
    writer.put(stream, "first")
    writer.close()
    assert not stream.lines
    stream.open.set()


def test_the_end_waits_for_a_stream_that_takes_lines_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line_writer, "_END_SECONDS", 0.5)
    monkeypatch.setattr(line_writer, "_BATCH", 1)
    stream, slow = Stream(), threading.Event()

    def take(_: object, text: str) -> None:
        slow.wait(0.05)  # nobody sets it: so long takes each line
        stream.write(f"{text}\n")

    writer = LineWriter(take, "lines", str)
    for number in range(20):
        writer.put(stream, str(number))
    writer.close()
    assert len(stream.lines) == 20
