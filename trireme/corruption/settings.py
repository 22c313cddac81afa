"""When digests are taken, and what is done where they differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig

Action = Literal["warn", "stop", "heal"]

SHARE = 0.002
"""The share of a task's time that digests between two checks may take."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a job."""

    every: int = 0  # global steps between two checks; 0 for none
    action: Action = "warn"

    @classmethod
    def of(cls, config: JobConfig) -> Settings:
        """Returns those of a job; raises `ConfigurationError` where they make no sense."""
        given = config.plugin_options
        every = given.get("check_every")
        action = cast(Action, given.get("on_corruption", "warn"))
        if every is None and "on_corruption" in given:
            raise ConfigurationError(
                f"on-corruption is {action} ({config.origin('on_corruption')}), and nothing is "
                "compared: add --check-every N"
            )
        return cls(int(every or 0), action)

    def due(self, before: int, step: int) -> bool:
        """Returns whether a check is due at a step, of values that were of a step before."""
        return self.every > 0 and step // self.every > before // self.every


class Budget:
    """Allows digests between checks as long as they take a small share of the time."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began, self._spent = now(), 0.0

    def allows(self) -> bool:
        """Returns whether a further digest may be taken now."""
        return self._spent <= SHARE * (self._now() - self._began)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time of a block."""
        began = self._now()
        try:
            yield
        finally:
            self._spent += self._now() - began
