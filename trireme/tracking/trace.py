"""The timeline of a whole job in Chrome's trace-event format, for viewers such as Perfetto.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trireme.files import write_atomically
from trireme.tracking.server_trace import Note

Event = dict[str, Any]

_PHASES, _STAGES, _OPERATORS = 1, 2, 10
STAGE = "stage"  # the category of the operations of a pipeline's stages, or of a graph's segments
MESSAGE = "message"
"""The category of messages between the processes of a process group, which may overlap."""

_MOST_BYTES = 1 << 28
"""The most bytes of a part, unpacked: a small message could hold any number of zeros."""

_SLACK = 1.0  # seconds by which clocks of two machines may differ from the measured offset


class TraceSpan(msgspec.Struct, frozen=True, array_like=True):
    """A step, a phase, an operation of a stage, an operator, or a message, of a worker."""

    name: str
    # `step`, `phase`, `stage` for an operation of a pipeline's stage or of a graph's segment,
    # `message`, or the category that `torch.profiler` gives an operator
    category: str
    began: float
    ended: float
    thread: int | None = None  # the thread or stream of an operator; None for all others


class WorkerPart(msgspec.Struct, frozen=True):
    """The trace of one worker."""

    task: str
    place: int  # the number of the task in the job, as `TaskConfig.number`
    offset: float  # the offset of its clock to the common clock, in seconds
    spans: tuple[TraceSpan, ...]


class ServerPart(msgspec.Struct, frozen=True):
    """The trace of one server: its index, the offset of its clock, its notes."""

    index: int
    offset: float
    notes: tuple[Note, ...]


def pack(part: WorkerPart) -> bytes:
    """Returns a part as compressed bytes."""
    return gzip.compress(msgspec.msgpack.encode(part), 5)


def unpack(data: bytes) -> WorkerPart:
    """Returns a part that was packed."""
    engine = zlib.decompressobj(zlib.MAX_WBITS | 16)  # gzip
    try:
        unpacked = engine.decompress(data, _MOST_BYTES)
        if engine.unconsumed_tail:
            raise ValueError(f"a part of a trace has more than {_MOST_BYTES} bytes")
        return msgspec.msgpack.decode(unpacked, type=WorkerPart)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"not a part of a trace: {error}") from error


def merge(workers: Sequence[WorkerPart], servers: Sequence[ServerPart] = ()) -> dict[str, Any]:
    """Returns a trace as the JSON object of the format, with times in microseconds.

    It uses the servers' notes of the time in which the workers traced.
    """
    # Times of day in microseconds would fill all digits of a float.
    base = min((worker.offset for worker in workers), default=0.0)
    workers = [msgspec.structs.replace(each, offset=each.offset - base) for each in workers]
    servers = [msgspec.structs.replace(each, offset=each.offset - base) for each in servers]
    events = [event for each in servers for event in _of_server(_meanwhile(workers, each))]
    events += [event for worker in workers for event in _of_worker(worker)]
    timed = [event for event in events if "ts" in event]
    first = min((event["ts"] for event in timed), default=0.0)
    for event in timed:
        event["ts"] = round(event["ts"] - first, 3)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Writes a gzipped trace atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, gzip.compress(msgspec.json.encode(trace), 6))


def _meanwhile(workers: Sequence[WorkerPart], server: ServerPart) -> ServerPart:
    steps = [(w.offset, s) for w in workers for s in w.spans if s.category == "step"]
    began = min((offset + s.began for offset, s in steps), default=0.0) - server.offset - _SLACK
    ended = max((offset + s.ended for offset, s in steps), default=0.0) - server.offset + _SLACK
    notes = tuple(note for note in server.notes if note.ended >= began and note.began <= ended)
    return msgspec.structs.replace(server, notes=notes)


def _of_server(server: ServerPart) -> Iterator[Event]:
    pid, offset = 1 + server.index, server.offset
    yield from _named(pid, f"ps:{server.index}", {_PHASES: "messages"})
    for note in server.notes:
        applies = note.name == "apply"
        name = f"apply step {note.step}" if applies else f"{note.name} {note.peer}"
        category = "apply" if applies else "message"
        yield _slice(name, category, (pid, _PHASES), note.began + offset, note.ended + offset)


def _of_worker(worker: WorkerPart) -> Iterator[Event]:
    pid, offset = worker.place, worker.offset
    threads = sorted({span.thread for span in worker.spans if span.thread is not None})
    numbers = {thread: _OPERATORS + place for place, thread in enumerate(threads)}
    tracks = {_PHASES: "phases"} | dict.fromkeys(numbers.values(), "operators")
    if any(span.category == STAGE for span in worker.spans):
        tracks[_STAGES] = "stages"
    yield from _named(pid, worker.task, tracks)
    for place, span in enumerate(worker.spans):
        number = _STAGES if span.category == STAGE else _PHASES
        track = (pid, number if span.thread is None else numbers[span.thread])
        event = _slice(span.name, span.category, track, span.began + offset, span.ended + offset)
        if span.category != MESSAGE:
            yield event
            continue
        event["id"] = f"{pid}/{place}"  # viewers draw events with ids beside each other
        yield {**event, "ph": "b"}
        yield {**event, "ph": "e", "ts": event["ts"] + event["dur"]}


def _named(pid: int, name: str, tracks: dict[int, str]) -> Iterator[Event]:
    about = {"process_name": {"name": name}, "process_sort_index": {"sort_index": pid}}
    for kind, value in about.items():
        yield {"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": value}
    for tid, track in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}


def _slice(name: str, category: str, track: tuple[int, int], began: float, ended: float) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": track[0],
        "tid": track[1],
        "ts": 1e6 * began,
        "dur": round(1e6 * max(0.0, ended - began), 3),
    }
