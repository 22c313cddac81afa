"""What is recorded of each step of a run, and what the records of all workers make together.

Tensors are recorded as sketches: few numbers, by which the distance of two is estimated. A sketch
has the products of the tensor with fixed vectors of random signs. The square of each is, in
expectation, the squared norm of the tensor (Alon, Matias, Szegedy: The Space Complexity of
Approximating the Frequency Moments, STOC 1996, section 2.2). Sketches add up as the tensors do: the
sketch of a mean of gradients is the mean of their sketches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import mul
from pathlib import Path

import msgspec
import torch

_WARNS = " | warning: "
_FAILED = ". First "  # begins the cause in the launcher's report
_MARKS = 16
_COLUMNS = 4096
_ROWS = 256  # that are in memory as float64 at a time
FLOAT32 = 2.0**-23  # its precision
_PLACES = 65_521  # by which the places of elements are told apart; a prime


class Sketch(msgspec.Struct, frozen=True, array_like=True):
    """What stands for a tensor, or for a number."""

    marks: tuple[float, ...]  # the products of its finite elements with vectors of random signs
    count: int  # of elements
    last: float = 0.0  # the norm of a unit in the last place of each; 0 if narrower than float32
    broken: float = 0.0  # tells which elements are NaN or infinite; 0 where none are

    @property
    def norm(self) -> float:
        """The L2 norm of the tensor's finite elements, estimated."""
        return math.hypot(*self.marks) / math.sqrt(len(self.marks))

    @property
    def size(self) -> float:
        """The number that it stands for, or the norm of the tensor."""
        if len(self.marks) > 1:
            return self.norm
        return math.nan if self.broken else self.marks[0]


def number(value: float) -> Sketch:
    """Returns the sketch of one number, which is exact; all that are not finite are alike."""
    return Sketch((value,), 1) if math.isfinite(value) else Sketch((0.0,), 1, broken=1.0)


def sketch(tensor: torch.Tensor) -> Sketch:
    """Returns the sketch of a tensor of real numbers, of any shape, dtype and device."""
    flat, size = tensor.detach().reshape(-1), _ROWS * _COLUMNS
    marks, broken = torch.zeros(_MARKS, dtype=torch.float64), 0.0
    for block, part in enumerate(torch.split(flat, size)):
        part = part.to("cpu", torch.float64)
        places = (~part.isfinite()).nonzero().squeeze(1)
        kinds = part[places].nan_to_num(nan=1.0, posinf=2.0, neginf=3.0)
        broken += float((kinds * (1 + (size * block + places) % _PLACES)).sum())
        part = part.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        whole = torch.nn.functional.pad(part, (0, -len(part) % _COLUMNS)).view(-1, _COLUMNS)
        rows = _signs(1 + block, _ROWS)[: len(whole)]
        marks += ((whole @ _signs(0, _COLUMNS)) * rows).sum(0)
    found = Sketch(tuple(marks.tolist()), flat.numel(), 0.0, broken)
    eps = precision(flat.dtype)
    return found if eps > FLOAT32 else msgspec.structs.replace(found, last=eps * found.norm)


def precision(dtype: torch.dtype) -> float:
    """Returns the distance from 1 to the next number of a dtype; 0 of integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def combined(*parts: tuple[float, Sketch]) -> Sketch:
    """Returns the sketch of the sum of tensors, each times a factor."""
    first = parts[0][1]
    columns = zip(*(each.marks for _, each in parts), strict=True)
    marks = tuple(sum(map(mul, [f for f, _ in parts], column)) for column in columns)
    broken = next((each.broken for _, each in parts if each.broken), 0.0)
    return Sketch(marks, first.count, first.last, broken)


def distance(one: Sketch, other: Sketch) -> float:
    """Returns the L2 norm of a difference, estimated; infinite where shapes or NaNs differ."""
    if (one.count, one.broken) != (other.count, other.broken):
        return math.inf
    return combined((1.0, one), (-1.0, other)).norm


@cache
def _signs(seed: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, (rows, _MARKS), generator=generator).to(torch.float64) * 2 - 1


class Record(msgspec.Struct, kw_only=True):
    """The numbers of one step: of one worker, or joined, of all of them.

    They are sketched under `STAGE/NAME`: `examples`, summed up; `loss`; `gradient`, as backward
    leaves it; `pushed`, as the optimizer receives it, whose `settings` these are; `buffers`; and,
    from the chief, `values` and `state` of the whole job.
    """

    task: str = ""
    step: int = 0  # the global step that the update has made
    weight: float = 0.0  # the number of examples that the gradient is the mean of
    weighed: bool = False  # whether computed gradients are multiplied by the weights already
    positions: list[int] = []  # of the examples that the job has dealt
    shapes: list[str] = []  # of the inputs of one example, for each call of the model
    line: str = ""  # of the program, which made the step
    eps: float = 0.0  # of the lowest precision that was computed in so far
    drew: list[str] = []  # where the program drew, other than by dropout: `model`, `loop`
    notes: list[str] = []  # what was changed for the comparison
    layers: list[str] = []  # those that depend on the whole batch, with their kinds
    hooks: list[str] = []  # the parameters with hooks of the program
    unreached: list[str] = []  # the parameters without a gradient
    sketches: dict[str, Sketch] = {}
    batches: int = 0  # before the first step: how many batches one global step is made of
    nature: str = ""  # before the first step: why the job cannot equal one process
    workers: list[Record] = []  # of a joined one: those that had examples, in their order

    def stage(self, stage: str) -> dict[str, Sketch]:
        """Returns the sketches of one stage, by name."""
        prefix, found = f"{stage}/", self.sketches.items()
        return {key.removeprefix(prefix): each for key, each in found if key.startswith(prefix)}

    def write(self, directory: str) -> None:
        """Writes the record into a file of its own."""
        part = Path(directory, f"{self.task.replace('/', '-')}-{self.step}.part")
        part.write_bytes(msgspec.msgpack.encode(self))
        part.rename(part.with_suffix(".record"))


@dataclass(frozen=True)
class Run:
    """What a run has recorded."""

    directory: Path
    output: Sequence[str]  # the lines that they printed

    @cached_property
    def records(self) -> dict[int, list[Record]]:
        """By step, of each worker."""
        found: dict[int, list[Record]] = {}
        for path in sorted(self.directory.glob("*.record")):
            record = msgspec.msgpack.decode(path.read_bytes(), type=Record)
            found.setdefault(record.step, []).append(record)
        return dict(sorted(found.items()))

    @cached_property
    def steps(self) -> dict[int, Record]:
        """The same, joined into those of one process."""
        return joined(self.records)

    def notes(self) -> set[str]:
        """Returns what was changed for the comparison, and what the job has warned of."""
        noted = {each for step in self.records.values() for one in step for each in one.notes}
        warned = {line.partition(_WARNS)[2] for line in self.output if _WARNS in line}
        return noted | {f"the job warns: {text}" for text in warned}

    def cause(self) -> str:
        """Returns why it has failed, as the launcher says it."""
        told = [line.partition(_FAILED)[2] for line in self.output if _FAILED in line]
        return (told or [*self.output[-1:], "it made no step"])[0]


def joined(records: Mapping[int, Sequence[Record]]) -> dict[int, Record]:
    """Returns each step as one process would have made it: sums, and means over the examples.

    Of values and buffers it has the movement since the beginning.
    """
    steps = {number: _joined(each) for number, each in records.items()}
    begin = next((dict(e.sketches) for e in steps.values() if e.stage("values")), {})
    for step in steps.values():
        for key, now in step.sketches.items():
            before = begin.get(key) if key.startswith(("values/", "buffers/")) else None
            if before is not None and before.count == now.count:
                step.sketches[key] = combined((1.0, now), (-1.0, before))
    return steps


def _joined(records: Sequence[Record]) -> Record:
    part = [each for each in records if each.weight > 0] or list(records)
    part.sort(key=lambda each: (each.positions[:1], each.task))
    first, chief = part[0], [each for each in records if each.stage("values")]
    weight, whole = sum(each.weight for each in part), [1.0] * len(part)
    shares = [each.weight / (weight or 1.0) for each in part]
    # Contents are not compared where padding changes them.
    shapes = first.shapes if all(each.shapes == first.shapes for each in part) else []
    return msgspec.structs.replace(
        first,
        weight=weight,
        positions=sorted({place for each in part for place in each.positions}),
        shapes=shapes,
        eps=max(each.eps for each in part),
        sketches={
            **_means("examples", part, whole),
            **_means("loss", part, shares),
            **_means("gradient", part, whole if first.weighed else shares),
            **_means("pushed", part, shares),
            **_means("settings", part[:1], whole),
            **_means("buffers", records, [1.0] * len(records)),
            **_means("values", chief[:1], whole),
            **_means("state", chief[:1], whole),
        },
        workers=part,
    )


def _means(stage: str, records: Sequence[Record], weights: Sequence[float]) -> dict[str, Sketch]:
    """Returns means over the workers that hold a tensor, or sums, of examples."""
    found: dict[str, Sketch] = {}
    held = [(w, e.stage(stage), {*e.unreached}) for w, e in zip(weights, records, strict=False)]
    for key in dict.fromkeys(key for _, each, _ in held for key in each):
        total = sum(w for w, each, unreached in held if key in each or key in unreached)
        by = total if total and stage != "examples" else 1.0
        found[f"{stage}/{key}"] = combined(*((w / by, e[key]) for w, e, _ in held if key in e))
    return found
