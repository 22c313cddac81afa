"""(e) Codecs: how fast they encode and decode, and below which bandwidth each pays."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.context import Context
from benchmarks.pairs import Plan, Sample, interleave
from benchmarks.report import figure
from benchmarks.results import Kind, Result
from trireme.compression.codec import CODECS, ErrorFeedback

NUMBERS = 1_000_000
COPY = "memcpy"


def pays_below(saved_bytes: float, seconds: float) -> float:
    """Returns the bandwidth, in bytes a second, below which a codec saves more than it takes.

    Args:
        saved_bytes: how many fewer bytes cross.
        seconds: encoding and decoding together.
    """
    return saved_bytes / seconds


def run(context: Context) -> Result:
    """Measures the gigabytes of numbers a second of each codec, each way."""
    result = Result(
        name="codecs",
        title="Codecs on 1M float32 numbers",
        unit="GB/s of numbers",
        higher_is_better=True,
        references=(COPY,),
        work="call",
    )
    torch.set_num_threads(1)
    values = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0)) * 1e-3
    turns: list[_Turn] = [_Copy(COPY, values)]
    for name, make in CODECS.items():
        codec = make()
        turns += [
            _Encode(f"{name} encode", values, codec),
            _Feedback(f"{name} encode with error feedback", values, codec),
            _Decode(f"{name} decode", values, codec),
        ]
    plan = Plan(3, least=3) if context.quick else Plan(15, 2, seconds=context.seconds, least=5)
    measured = interleave(turns, plan, say=context.say)
    kinds: dict[str, Kind] = {
        turn.name: "limit" if turn.name == COPY else "trireme" for turn in turns
    }
    result.add(measured, kinds)
    result.notes.append("Pays below: the bandwidth under which encode (with error feedback) and "
                        "decode take less than the bytes that they save.")  # fmt: skip
    for name, make in CODECS.items():
        result.notes.append(_pays(result, name, make().nbytes(NUMBERS)))
    return result


def _pays(result: Result, name: str, nbytes: int) -> str:
    entries = [result.find("", f"{name} {way}") for way in ("encode with error feedback", "decode")]
    full = 4 * NUMBERS
    seconds = sum(full / 1e9 / entry.spread.median for entry in entries if entry is not None)
    bandwidth = pays_below(full - nbytes, seconds) if seconds else float("nan")
    return (
        f"{name}: {full / nbytes:.3g} times fewer bytes; pays below {figure(bandwidth / 1e9)} GB/s "
        f"({figure(bandwidth * 8 / 1e9)} Gbit/s)"
    )


@dataclass
class _Turn(ABC):
    """Something that is called again and again on the same numbers."""

    name: str
    values: torch.Tensor
    codec: Any = None
    data: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        if self.codec is not None:
            self.data = torch.zeros(self.codec.nbytes(NUMBERS), dtype=torch.uint8)
            self.codec.encode(self.values, self.data)
        self.out = torch.zeros_like(self.values)

    @abstractmethod
    def call(self) -> None:
        """Does it once."""

    def measure(self) -> Sample:
        """Returns the gigabytes of numbers a second."""
        begin, cpu = time.perf_counter(), time.process_time()
        count = 0
        while time.perf_counter() - begin < 0.05:
            self.call()
            count += 1
        seconds = time.perf_counter() - begin
        return Sample(4e-9 * NUMBERS * count / seconds, count, time.process_time() - cpu)


class _Copy(_Turn):
    def call(self) -> None:
        self.out.copy_(self.values)


class _Encode(_Turn):
    def call(self) -> None:
        self.codec.encode(self.values, self.data)


class _Decode(_Turn):
    def call(self) -> None:
        self.codec.decode(self.data, self.out)


class _Feedback(_Turn):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._feedback = ErrorFeedback(self.codec, NUMBERS)

    def call(self) -> None:
        self._feedback.encode(self.values, self.data)
