"""One timeline of a whole job, in Chrome's trace-event format: for Perfetto and its like.

Each worker leaves its part, whose times are on its own clock, with what has to be added to get to
the common one. `merge` puts the parts and the servers' notes together, and draws an arrow from each
push to the step on a server that it became part of.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trireme.ps.notes import Note

__all__ = [
    "Operator",
    "PushSpan",
    "ServerPart",
    "Span",
    "WorkerPart",
    "merge",
    "pack",
    "unpack",
    "write_trace",
]

Event = dict[str, Any]

_PHASES, _OPERATORS = 1, 10
_SLACK = 1.0  # seconds that two machines' clocks may differ by more than was found


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A phase or a step of a worker: its name, and when it began and ended, in seconds."""

    name: str
    began: float
    ended: float


class Operator(msgspec.Struct, frozen=True, array_like=True):
    """What `torch.profiler` saw: name, category, when, on which thread or stream."""

    name: str
    category: str
    began: float
    ended: float
    thread: int


class PushSpan(msgspec.Struct, frozen=True, array_like=True):
    """A push: when it was sent, and the step that it became part of on each server, or -1."""

    began: float
    ended: float
    steps: tuple[int, ...]


class WorkerPart(msgspec.Struct, frozen=True):
    """What one worker did.

    Attributes:
        task: its name.
        place: its place in the job, as `TaskConfig.place`.
        offset: what to add to its times for the common clock, in seconds.
        steps: the steps that were traced.
        phases: their phases.
        pushes: their pushes.
        operators: what was computed.
    """

    task: str
    place: int
    offset: float
    steps: tuple[Span, ...]
    phases: tuple[Span, ...]
    pushes: tuple[PushSpan, ...]
    operators: tuple[Operator, ...]


class ServerPart(msgspec.Struct, frozen=True):
    """What one server did: its index, what to add to its times, its notes."""

    index: int
    offset: float
    notes: tuple[Note, ...]


def pack(part: WorkerPart) -> bytes:
    """Returns a part as bytes that travel."""
    return gzip.compress(msgspec.msgpack.encode(part), 5)


def unpack(data: bytes) -> WorkerPart:
    """Returns a part that was packed.

    Raises:
        ValueError: it is none.
    """
    try:
        return msgspec.msgpack.decode(gzip.decompress(data), type=WorkerPart)
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise ValueError(f"this is no part of a trace: {error}") from error


def merge(workers: Sequence[WorkerPart], servers: Sequence[ServerPart] = ()) -> dict[str, Any]:
    """Returns a trace as the object that the format's JSON holds. Times are microseconds.

    Of the servers' notes it takes those of the time in which the workers traced.
    """
    servers = [_meanwhile(workers, server) for server in servers]
    events = [event for server in servers for event in _of_server(server)]
    events += [event for worker in workers for event in _of_worker(worker)]
    applied = {
        (server.index, note.step): (1 + server.index, note.began + server.offset)
        for server in servers
        for note in server.notes
        if note.name == "apply"
    }
    for worker in workers:
        events += _arrows(worker, applied)
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Writes a trace, gzipped, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(gzip.compress(msgspec.json.encode(trace), 6))
    beside.replace(path)


def _meanwhile(workers: Sequence[WorkerPart], server: ServerPart) -> ServerPart:
    """Returns a server's part without what it noted for an earlier or a later trace."""
    times = [(w.offset + s.began, w.offset + s.ended) for w in workers for s in w.steps]
    began = min((began for began, _ in times), default=0.0) - server.offset - _SLACK
    ended = max((ended for _, ended in times), default=0.0) - server.offset + _SLACK
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
    threads = sorted({each.thread for each in worker.operators})
    numbers = {thread: _OPERATORS + place for place, thread in enumerate(threads)}
    tracks = {_PHASES: "phases"} | {number: "operators" for number in numbers.values()}
    yield from _named(pid, worker.task, tracks)
    for category, spans in (("step", worker.steps), ("phase", worker.phases)):
        for span in spans:
            began, ended = span.began + offset, span.ended + offset
            yield _slice(span.name, category, (pid, _PHASES), began, ended)
    for each in worker.operators:
        track = (pid, numbers[each.thread])
        yield _slice(each.name, each.category, track, each.began + offset, each.ended + offset)


def _arrows(
    worker: WorkerPart, applied: dict[tuple[int, int], tuple[int, float]]
) -> Iterator[Event]:
    """Yields an arrow from each push to each step on a server that it became part of."""
    for number, push in enumerate(worker.pushes):
        for server, step in enumerate(push.steps):
            if (server, step) not in applied:
                continue
            pid, began = applied[server, step]
            common = {
                "name": "push",
                "cat": "push",
                "id": f"{worker.task}/{number}/ps:{server}",
            }
            sent = 1e6 * (push.began + worker.offset)
            # Where two machines' clocks differ by more than was found, an arrow points back.
            yield {**common, "ph": "s", "pid": worker.place, "tid": _PHASES, "ts": sent}
            yield {**common, "ph": "f", "bp": "e", "pid": pid, "tid": _PHASES, "ts": 1e6 * began}


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
