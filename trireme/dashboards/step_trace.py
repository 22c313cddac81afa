"""The trace of one step by torch's profiler, for TensorBoard's XProf and viewers of Chrome traces.

XProf reads OpenXLA's XSpace (`xplane.proto`), a protocol buffer: planes (the host, and each device)
have lines (threads, and streams of kernels), and these have events, whose names stand in a table of
the plane. PyTorch does not write this format. Few of its fields are needed, and they are encoded
here by hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.profiler

STEP = "step"
"""The name of the event that contains all others."""

_PICOSECONDS = 1_000_000  # in a microsecond, the profiler's unit
_SHAPES, _STEP_NUMBER, _ROOT = 1, 2, 3  # what is known of an event besides its time
_STATS = {_SHAPES: "shapes", _STEP_NUMBER: "step_num", _ROOT: "_r"}


class StepTrace:
    """Traces from its creation until `stop`."""

    def __init__(self) -> None:
        self._profile: Any = torch.profiler.profile(record_shapes=True, profile_memory=True)
        self._profile.start()
        record: Any = torch.profiler.record_function
        self._whole = record(STEP)
        self._whole.__enter__()

    def stop(self) -> None:
        """Ends the trace. It must be called in the thread that began it."""
        self._whole.__exit__(None, None, None)
        self._profile.stop()

    def write(self, directory: Path, process: str, step: int) -> None:
        """Writes the trace twice: for the profiler plugin, and as a Chrome trace.

        The plugin lists each step as a session, and in it each process as a host.

        Raises:
            OSError: a file cannot be written.
        """
        session = directory / "plugins" / "profile" / f"step_{step:09}"
        session.mkdir(parents=True, exist_ok=True)
        events = self._profile.events() or ()
        (session / f"{process}.xplane.pb").write_bytes(encode(events, step))
        self._profile.export_chrome_trace(str(directory / f"{process}.{step:09}.pt.trace.json"))


def encode(events: Iterable[Any], step: int) -> bytes:
    """Encodes a profiler's events: a plane for the host, and one for each device with events."""
    planes: dict[str, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.device_type.name == "CPU":
            planes["/host:CPU"][event.thread].append(event)
        else:
            planes[f"/device:GPU:{event.device_index}"][event.device_resource_id].append(event)
    return b"".join(
        _bytes(1, _plane(number, name, planes[name], step))
        for number, name in enumerate(sorted(planes, reverse=True), 1)
    )


def _plane(number: int, name: str, lines: dict[int, list[Any]], step: int) -> bytes:
    names: dict[str, int] = {}
    line = "thread" if name == "/host:CPU" else "stream"
    encoded = b"".join(
        _bytes(3, _number(1, place) + _text(2, f"{line} {place}") + _events(events, names, step))
        for place, events in sorted(lines.items())
    )
    return (
        _number(1, number)
        + _text(2, name)
        + encoded
        + b"".join(_entry(4, key, text) for text, key in names.items())
        + b"".join(_entry(5, key, text) for key, text in _STATS.items())
    )


def _events(events: list[Any], names: dict[str, int], step: int) -> bytes:
    """Encodes a line's events; numbers the names that are new."""
    encoded = []
    for event in events:
        start, end = event.time_range.start, event.time_range.end
        body = _number(1, names.setdefault(event.name, len(names) + 1))
        body += _number(2, round(start * _PICOSECONDS))
        body += _number(3, max(round((end - start) * _PICOSECONDS), 0))
        if shapes := ", ".join("x".join(map(str, shape)) for shape in event.input_shapes if shape):
            body += _bytes(4, _number(1, _SHAPES) + _text(5, shapes))
        if event.name == STEP:
            body += _bytes(4, _number(1, _STEP_NUMBER) + _number(4, step))
            body += _bytes(4, _number(1, _ROOT) + _number(4, 1))  # a step, as XProf understands it
        encoded.append(_bytes(4, body))
    return b"".join(encoded)


def _entry(field: int, key: int, text: str) -> bytes:
    """Encodes an entry of a table of names, which holds its key twice."""
    return _bytes(field, _number(1, key) + _bytes(2, _number(1, key) + _text(2, text)))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Encodes a number from 0, seven bits a byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
