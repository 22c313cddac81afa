"""The numbers of each step that two runs are compared by, and the files that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from trireme.verification.sketch import Sketches

_LENGTH = 4  # bytes before each record


class Record(msgspec.Struct, kw_only=True):
    """The numbers of one step of one worker.

    Attributes:
        task: the worker.
        step: the global step that the update has made.
        weight: the number of examples that the gradient is the mean of.
        weighed: whether the computed gradients are multiplied by the weights already, so that their
            plain mean is that of all examples.
        spans: the positions of the examples, as `(start, stop)`; none where an earlier step of
            another optimizer has them, and where the program makes its own batches.
        dealt: whether the job has dealt the program a batch.
        examples: for each call of the model, a digest of the whole numbers of each example.
        marks: for each call, a sketch of the other numbers of each example: they may be results of
            another model, and differ in the last place.
        shapes: for each call, the shapes of the inputs of one example, which padding may change.
        losses: of each `backward()`, in order.
        line: the line of the program that made the step.
        settings: the numbers of each parameter group of the optimizer.
        drew: where the program drew random numbers, other than by dropout: `model`, `loop`.
        notes: what was changed for the comparison.
        layers: the kinds of layers of the model whose results depend on the whole batch, by name.
        unreached: the parameters without a gradient.
        computed: the gradients as backward leaves them.
        pushed: the gradients as the optimizer, or a server, receives them.
        buffers: the buffers after the step.
        values, state: of the whole job after the step, where this worker is chief.
        unmoved: by parameter, the share of the elements with a gradient that the step left as they
            were.
        hooks: the number of calls of each hook of the program's.
        batches: before the first step: how many batches one global step is made of.
        nature: before the first step: why the job cannot equal one process; "" where it can.
    """

    task: str
    step: int = 0
    weight: float = 0.0
    weighed: bool = False
    spans: tuple[tuple[int, int], ...] = ()
    dealt: bool = False
    examples: list[list[int]] = []
    marks: list[list[float]] = []
    shapes: list[str] = []
    losses: list[float] = []
    line: str = ""
    settings: list[dict[str, float]] = []
    drew: list[str] = []
    notes: list[str] = []
    layers: dict[str, str] = {}
    unreached: list[str] = []
    computed: Sketches = {}
    pushed: Sketches = {}
    buffers: Sketches = {}
    values: Sketches = {}
    state: Sketches = {}
    unmoved: dict[str, float] = {}
    hooks: dict[str, int] = {}
    batches: int = 0
    nature: str = ""


class RecordFile:
    """Appends records to the file of one worker."""

    def __init__(self, directory: Path, task: str) -> None:
        name = task.replace(":", "-").replace("/", "-")
        self._file = (directory / f"{name}.records").open("ab", buffering=0)

    def append(self, record: Record) -> None:
        data = msgspec.msgpack.encode(record)
        self._file.write(len(data).to_bytes(_LENGTH, "little") + data)

    def close(self) -> None:
        self._file.close()


def read_records(directory: Path) -> dict[int, list[Record]]:
    """Returns the records of all workers, by step; a record that is cut at the end is left out."""
    found: dict[int, list[Record]] = {}
    for path in sorted(directory.glob("*.records")):
        for record in _records(path.read_bytes()):
            found.setdefault(record.step, []).append(record)
    return dict(sorted(found.items()))


def _records(data: bytes) -> Iterator[Record]:
    place = 0
    while place + _LENGTH <= len(data):
        size = int.from_bytes(data[place : place + _LENGTH], "little")
        place += _LENGTH
        if place + size > len(data):
            return
        decoded: Any = msgspec.msgpack.decode(data[place : place + size], type=Record)
        yield decoded
        place += size
