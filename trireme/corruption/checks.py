"""When a task takes digests, which of several copies is wrong, and what it does with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from trireme.errors import ConfigurationError, CorruptedValues
from trireme.job_config import JobConfig
from trireme.monitor.records import CORRUPTED

SHARE = 0.002
"""The share of a task's time that digests between two checks may take."""

_MOST_TIMES = 3
"""What is found so often in turn ends a job that heals: memory, or a network, stays bad."""


class Checks:
    """The options of a job, the time that digests take in one task, and what it has found.

    Args:
        config: the job's; `ConfigurationError` is raised where its options make no sense.
        say: shows a line.

    Attributes:
        every: the global steps between two checks; 0 for none.
        action: what is done of values that have changed by themselves: warn, stop, or heal.
        error: what ends the job, once it is found: another thread of the task raises it too.
    """

    def __init__(self, config: JobConfig, say: Callable[[str], object]) -> None:
        given = config.plugin_options
        self.every = int(given.get("check_every") or 0)
        self.action = given.get("on_corruption", "warn")
        if not self.every and "on_corruption" in given:
            raise ConfigurationError(
                f"on-corruption is {self.action} ({config.origin('on_corruption')}), and nothing "
                "is compared: add --check-every N"
            )
        self.error: CorruptedValues | None = None
        self._say = say
        self._began, self._spent = perf_counter(), 0.0
        self._count, self._last, self._times = 0, "", 0
        self._said: set[str] = set()  # what copies differ in

    def due(self, before: int, step: int) -> bool:
        """Returns whether a check is due at a step, of values that were of a step before."""
        return step // self.every > before // self.every

    def wants(self, before: int, step: int) -> bool:
        """Returns whether a digest is to be taken: one is due, or there is time for it."""
        in_time = self._spent <= SHARE * (perf_counter() - self._began)
        return in_time or self.due(before, step)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time of a block."""
        began = perf_counter()
        try:
            yield
        finally:
            self._spent += perf_counter() - began

    def found(self, what: str, *, stops: bool = False) -> None:
        """Says what was found; raises it where that ends the job."""
        text = f"corrupted values: {what}"
        self._times = self._times + 1 if text == self._last else 1
        self._count, self._last = self._count + 1, text
        stops |= self.action == "heal" and self._times > _MOST_TIMES
        if stops or self.action == "stop":
            self.error = CorruptedValues(text)
            raise self.error
        self._say(text)

    def compare(
        self, what: str, step: int, copies: Mapping[str, Mapping[str, int]], own: str = ""
    ) -> tuple[list[str], list[str]]:
        """Says once which copies are wrong; returns the good and the wrong, if they are healed.

        Copies that were changed by themselves hardly agree with each other: that most of them do
        says that they are right.

        Args:
            what: what they are copies of.
            step: the global step.
            copies: by task the digests of its tensors, by their names.
            own: the task that says it only where it is wrong itself.
        """
        groups: dict[tuple[tuple[str, int], ...], list[str]] = {(): []}
        for task, taken in copies.items():
            groups.setdefault((*taken.items(),), []).append(task)
        first, second = sorted(groups.values(), key=len, reverse=True)[:2]
        good = first if len(first) > len(second) else []
        wrong = [task for task in copies if task not in good]
        key, heals = f"{what} {min(copies)}", self.action == "heal"
        if not wrong:
            self._said.discard(key)
        elif key not in self._said and own in ("", *wrong):
            self._said.add(key)
            found = [n for n in copies[wrong[0]] if len({c.get(n) for c in copies.values()}) > 1]
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            where = f"at step {step}, in {', '.join(found[:3])}{more}"
            text = f"{', '.join(wrong)} has other values of {what} than {', '.join(good)} {where}"
            if not good:
                both = " and ".join(wrong)
                text = f"{both} have different values of {what} {where}; nothing says who is right"
            self.found(text, stops=heals and not good)
        return (good, wrong) if heals and good else ([], [])

    def status(self) -> Mapping[str, float | str]:
        """Returns how much was found, and what last."""
        last = {CORRUPTED: self._last} if self._last else {}
        return {"corruptions": self._count, **last}
