"""The numbers of each step that two runs are compared by, and the files that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import mul
from pathlib import Path

import msgspec

from trireme.verification.sketch import Sketch, combined, number


class Record(msgspec.Struct, kw_only=True):
    """The numbers of one step: of one worker, or joined, of all of them.

    Tensors are sketched under `KIND/NAME`: `gradient`, as backward leaves it; `pushed`, as the
    optimizer receives it; `buffers`; and, from the chief, `values` and `state` of the whole job.
    """

    task: str = ""
    step: int = 0  # the global step that the update has made
    weight: float = 0.0  # the number of examples that the gradient is the mean of
    weighed: bool = False  # whether computed gradients are multiplied by the weights already
    positions: list[int] = []  # of the examples that the job has dealt
    dealt: bool = False  # whether it has dealt any; with two optimizers one of them has these
    # for each call of the model, the shapes of the inputs of one example, and a number for each
    calls: list[tuple[str, list[float]]] = []
    losses: list[float] = []  # of each `backward()`, in order
    line: str = ""  # of the program, which made the step
    settings: dict[str, float] = {}  # the numbers of the optimizer's parameter groups
    eps: float = 0.0  # of the lowest precision that was computed in so far
    drew: list[str] = []  # where the program drew, other than by dropout: `model`, `loop`
    notes: list[str] = []  # what was changed for the comparison
    layers: dict[str, str] = {}  # the kinds of layers that depend on the whole batch, by name
    hooks: list[str] = []  # the parameters with hooks of the program
    unreached: list[str] = []  # the parameters without a gradient
    tensors: dict[str, Sketch] = {}
    batches: int = 0  # before the first step: how many batches one global step is made of
    nature: str = ""  # before the first step: why the job cannot equal one process
    workers: list[Record] = []  # of a joined one: those that had examples, in their order

    def kind(self, kind: str) -> dict[str, Sketch]:
        """Returns the sketches of one kind of tensors, or of `loss` or `settings`, by name."""
        if kind == "settings":
            return {name: number(value) for name, value in self.settings.items()}
        if kind == "loss":
            count = len(self.losses)
            name = "the loss" if count == 1 else f"the loss of backward() {{}} of {count}"
            return {name.format(n): number(value) for n, value in enumerate(self.losses, 1)}
        prefix = f"{kind}/"
        found = self.tensors.items()
        return {key.removeprefix(prefix): each for key, each in found if key.startswith(prefix)}


def write_record(directory: Path, record: Record) -> None:
    """Writes a record into a file of its own."""
    name = record.task.replace(":", "-").replace("/", "-")
    part = directory / f"{name}.part"
    part.write_bytes(msgspec.msgpack.encode(record))
    part.rename(directory / f"{name}-{record.step}.record")


def read_records(directory: Path) -> dict[int, list[Record]]:
    """Returns the records of all workers, by step."""
    found: dict[int, list[Record]] = {}
    for path in sorted(directory.glob("*.record")):
        record = msgspec.msgpack.decode(path.read_bytes(), type=Record)
        found.setdefault(record.step, []).append(record)
    return dict(sorted(found.items()))


def joined(records: Mapping[int, Sequence[Record]]) -> dict[int, Record]:
    """Returns each step as one process would have made it: sums, and means over the examples.

    Of values and buffers it has the movement since the beginning.
    """
    steps = {number: _joined(number, each) for number, each in records.items()}
    begin = next((dict(e.tensors) for e in steps.values() if e.kind("values")), {})
    for step in steps.values():
        for key, now in step.tensors.items():
            before = begin.get(key, now)
            if key.startswith(("values/", "buffers/")) and before.count == now.count:
                step.tensors[key] = combined((1.0, now), (-1.0, before))
    return steps


def _joined(number: int, records: Sequence[Record]) -> Record:
    part = [each for each in records if each.weight > 0] or list(records)
    part.sort(key=lambda each: (each.positions[:1], each.task))
    weights = [each.weight for each in part]
    plain = [1.0 if each.weighed else each.weight for each in part]
    reduced = part[:1] if part[0].weighed else part
    chief = [each for each in records if each.kind("values")][:1]
    several = [each.losses for each in part]
    columns = list(zip(*several, strict=True)) if len(set(map(len, several))) == 1 else []
    return Record(
        step=number,
        weight=sum(weights),
        positions=sorted({place for each in part for place in each.positions}),
        calls=_calls(part),
        losses=[sum(map(mul, weights, each)) / sum(weights) for each in columns if sum(weights)],
        line=part[0].line,
        settings=part[0].settings,
        hooks=part[0].hooks,
        eps=max(each.eps for each in part),
        tensors={
            **_means("gradient", part, plain),
            **_means("pushed", reduced, weights),
            **_means("buffers", records, [1.0] * len(records)),
            **_means("values", chief, [1.0]),
            **_means("state", chief, [1.0]),
        },
        workers=part,
    )


def _means(kind: str, records: Sequence[Record], weights: Sequence[float]) -> dict[str, Sketch]:
    """Returns the weighted means of tensors; one that is missing counts as zeros."""
    pairs = [(w, each.tensors) for w, each in zip(weights, records, strict=False) if w]
    total = sum(weight for weight, _ in pairs)
    keys = dict.fromkeys(key for _, each in pairs for key in each if key.startswith(f"{kind}/"))
    return {k: combined(*((w / total, each[k]) for w, each in pairs if k in each)) for k in keys}


def _calls(part: Sequence[Record]) -> list[tuple[str, list[float]]]:
    """Returns what is known of all examples of each call of the model.

    Where shapes differ, by padding, the same examples have other contents: nothing is compared.
    """
    if len({tuple(shape for shape, _ in each.calls) for each in part}) != 1:
        return []
    calls = zip(*(each.calls for each in part), strict=True)
    return [(each[0][0], [number for _, numbers in each for number in numbers]) for each in calls]
