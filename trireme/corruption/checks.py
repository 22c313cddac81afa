"""When a task takes digests, and what it does with what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, cast

from trireme.errors import ConfigurationError, CorruptedValues
from trireme.job_config import JobConfig
from trireme.monitor.records import CORRUPTED

Action = Literal["warn", "stop", "heal"]

SHARE = 0.002
"""The share of a task's time that digests between two checks may take."""


class Checks:
    """The options of a job, the time that digests take in one task, and what it has found.

    Args:
        config: the job's; `ConfigurationError` is raised where its options make no sense.
        say: shows a line.
        now: returns the time in seconds.

    Attributes:
        every: the global steps between two checks; 0 for none.
        action: what is done of values that have changed by themselves.
    """

    def __init__(
        self,
        config: JobConfig,
        say: Callable[[str], object],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        given = config.plugin_options
        self.every = int(given.get("check_every") or 0)
        self.action = cast(Action, given.get("on_corruption", "warn"))
        if not self.every and "on_corruption" in given:
            raise ConfigurationError(
                f"on-corruption is {self.action} ({config.origin('on_corruption')}), and nothing "
                "is compared: add --check-every N"
            )
        self._say, self._now = say, now
        self._began, self._spent = now(), 0.0
        self._count, self._last = 0, ""
        self._said: set[object] = set()
        self._error: CorruptedValues | None = None

    def due(self, before: int, step: int) -> bool:
        """Returns whether a check is due at a step, of values that were of a step before."""
        return self.every > 0 and step // self.every > before // self.every

    def wants(self, before: int, step: int) -> bool:
        """Returns whether a digest is to be taken: one is due, or there is time for it."""
        in_time = self._spent <= SHARE * (self._now() - self._began)
        return self.due(before, step) or (self.every > 0 and in_time)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time of a block."""
        began = self._now()
        try:
            yield
        finally:
            self._spent += self._now() - began

    def found(self, what: str, key: object = None, *, stops: bool | None = None) -> str:
        """Says what was found, once for a key; raises it where that ends the job."""
        self._last = text = f"corrupted values: {what}"
        new = key is None or key not in self._said
        self._count += new
        self._said.add(key)
        if self.action == "stop" if stops is None else stops:
            self._error = CorruptedValues(text)
            raise self._error
        if new:
            self._say(text)
        return text

    def settled(self, key: object) -> None:
        """Notes that what was said is so no longer."""
        self._said.discard(key)

    def raise_found(self) -> None:
        """Raises what another thread has found, where it ends the job."""
        if self._error is not None:
            raise self._error

    def status(self) -> Mapping[str, float | str]:
        """Returns how much was found, and what last; nothing where nothing is compared."""
        last = {CORRUPTED: self._last} if self._last else {}
        return {"corruptions": self._count, **last} if self.every else {}
