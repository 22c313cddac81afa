"""What one task has found: it says each thing once, and tells it in its status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from trireme.corruption.judge import Verdict
from trireme.errors import CorruptedValues
from trireme.monitor.records import CORRUPTED

_NAMES = 3
"""So many tensors are named."""


class Findings:
    """The values that were found to have changed by themselves.

    Args:
        say: shows a line.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._count, self._last = 0, ""
        self._said: set[object] = set()

    def add(self, what: str, key: object = None, *, stops: bool = False) -> str:
        """Says what was found, once for a key; raises `CorruptedValues` where that ends the job."""
        self._last = text = f"corrupted values: {what}"
        if key is None or key not in self._said:
            self._count += 1
            self._said |= set() if key is None else {key}
            if not stops:
                self._say(text)
        if stops:
            raise CorruptedValues(text)
        return text

    def settled(self, key: object) -> None:
        """Notes that what was said is so no longer."""
        self._said.discard(key)

    def status(self) -> Mapping[str, float | str]:
        """Returns how many there were, and the last one."""
        return {"corruptions": self._count, **({CORRUPTED: self._last} if self._last else {})}


def differing(
    verdict: Verdict, tasks: Iterable[str], what: str, step: int, names: Sequence[str]
) -> str:
    """Returns what copies differ, in words; `names` are those of their tensors."""
    found = [names[place] for place in verdict.tensors if place < len(names)]
    more = f" and {len(found) - _NAMES} more" if len(found) > _NAMES else ""
    where = f"at step {step}" + (f", in {', '.join(found[:_NAMES])}{more}" if found else "")
    if not verdict.decided:
        both = " and ".join(tasks)
        return f"{both} have different values of {what} {where}; nothing says who is right"
    wrong, good = ", ".join(verdict.wrong), ", ".join(verdict.good)
    return f"{wrong} has other values of {what} than {good} {where}"
