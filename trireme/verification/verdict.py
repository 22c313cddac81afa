"""What is said of a job: whether it is the same as one process, and if not, where and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from trireme.verification.compare import Comparison, Difference

Outcome = Literal["same", "differs", "apart", "refused", "failed"]

_WORDS: Mapping[Outcome, str] = {
    "same": "the same",
    "differs": "DIFFERS",
    "apart": "differs by its nature",
    "refused": "refused",
    "failed": "FAILED",
}
_STAGES = {
    "examples": "the examples",
    "loss": "",
    "gradient": "the gradient of",
    "settings": "the optimizer's setting",
    "values": "the values of",
    "buffers": "the buffer",
    "state": "the optimizer's state",
}


@dataclass(frozen=True)
class Exact:
    """The element of a tensor that differs most, in both runs."""

    index: tuple[int, ...]
    job: float
    reference: float


@dataclass(frozen=True)
class Verdict:
    """What is said of one job.

    Attributes:
        name: the job, such as `sync, 1 server, 2 workers`.
        outcome: `same`; `differs`; `apart`: it cannot equal one process, by its nature; `refused`:
            the program or the launch cannot run so; `failed`: a run ended before its first step.
        against: what it was compared with, such as `one process`.
        reason: why.
        comparison: the numbers; None where there are none.
        exact: of the tensor that differs first, where it was looked at as a whole.
        notes: what was changed for the comparison.
    """

    name: str
    outcome: Outcome
    against: str = "one process"
    reason: str = ""
    comparison: Comparison | None = None
    exact: Exact | None = None
    notes: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        return _WORDS[self.outcome]

    @property
    def first(self) -> Difference | None:
        return None if self.comparison is None else self.comparison.first

    @property
    def distance(self) -> float | None:
        """How far the values are apart at the end, relative to how far training moved them."""
        curve = {} if self.comparison is None else self.comparison.curve
        return curve[max(curve)] if curve else None

    def lines(self) -> Iterator[str]:
        """Yields the verdict as lines of text."""
        steps = 0 if self.comparison is None else len(self.comparison.steps)
        if self.outcome == "same":
            yield f"{self.name}: {self.word} as {self.against}, in {steps} steps"
        elif self.outcome == "differs":
            yield f"{self.name}: {self.word} from {self.against}"
        else:
            yield f"{self.name}: {self.word}"
        if (first := self.first) is not None:
            yield f"  first: step {first.step}, {described(first)}"
            if self.exact is not None:
                index = list(self.exact.index)
                yield (
                    f"  most at element {index}: {self.exact.job:.9g} in the job, "
                    f"{self.exact.reference:.9g} in {self.against}"
                )
        if self.reason:
            yield f"  why: {self.reason}"
        if self.comparison is not None and self.distance is not None:
            yield (
                f"  values at the end: {self.distance:.1e} apart, relative to how far training "
                f"has moved them; tolerance of gradients {self.comparison.tolerance:.1e}"
            )
        yield from (f"  note: {note}" for note in self.notes)

    def as_dict(self) -> dict[str, Any]:
        """Returns the verdict as JSON has it."""
        made: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return made

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """Returns the verdict of which `as_dict` has made this."""
        return msgspec.convert(data, cls, str_keys=True)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def described(difference: Difference) -> str:
    """Returns a difference in words."""
    what = f"{_STAGES[difference.stage]} {difference.name}".strip()
    if difference.stage == "examples":
        return f"{what} ({difference.distance:.0f} of {difference.reference:.0f})"
    if difference.stage in ("loss", "settings"):
        both = f"{difference.job:.9g} and {difference.reference:.9g}"
        return f"{what} ({both}; at most {difference.allowed:.1e} apart is allowed)"
    return (
        f"{what} ({difference.relative:.1e} of its norm apart; "
        f"{difference.allowed / max(difference.reference, 1e-300):.1e} is allowed)"
    )


def exit_status(verdicts: list[Verdict]) -> int:
    """Returns the status of the command: 0 same, 1 a job differs, 3 a run failed."""
    outcomes = {each.outcome for each in verdicts}
    if "differs" in outcomes:
        return 1
    none = not outcomes - {"refused"}
    return 3 if "failed" in outcomes or none else 0
