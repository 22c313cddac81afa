"""What one task has found: it says each thing once, and tells it in its status."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trireme.errors import CorruptedValues
from trireme.monitor.records import CORRUPTED


class Findings:
    """The values that were found to have changed by themselves.

    Args:
        say: shows a line.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._count, self._last = 0, ""
        self._said: set[object] = set()

    def add(self, text: str, key: object = None, *, stops: bool = False) -> None:
        """Says what was found, once for a key; raises `CorruptedValues` where that ends the job."""
        self._last = text
        if stops:
            self._count += 1
            raise CorruptedValues(text)
        if key is None or key not in self._said:
            self._count += 1
            self._said |= set() if key is None else {key}
            self._say(text)

    def settled(self, key: object) -> None:
        """Notes that what was said is so no longer."""
        self._said.discard(key)

    def status(self) -> Mapping[str, float | str]:
        """Returns how many there were, and the last one."""
        return {"corruptions": self._count, **({CORRUPTED: self._last} if self._last else {})}
