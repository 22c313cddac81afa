"""When a task takes digests, which of several copies is wrong, and what it does with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from trireme.corruption.digests import Change, Seal
from trireme.errors import ConfigurationError, CorruptedValues
from trireme.job_config import JobConfig
from trireme.monitor.recording import CORRUPTED

SHARE = 0.002  # of a task's time, which digests between two checks may take
_MOST_TIMES = 3  # found in turn, after which a job that heals ends: memory, or a network, stays bad


class Checks:
    """The options of a job, the time that digests take in one task, and what it has found."""

    def __init__(self, config: JobConfig, say: Callable[[str], object]) -> None:
        given = config.plugin_options
        self.every = int(given.get("check_every") or 0)  # so many global steps; 0 for never
        self._action = given.get("on_corruption", "warn")
        self.heals = self._action == "heal"
        if not self.every and "on_corruption" in given:
            raise ConfigurationError(
                f"on-corruption is {self._action} ({config.origin('on_corruption')}), and nothing "
                "is compared: add --check-every N"
            )
        self.error: CorruptedValues | None = None  # ends the job, by whichever thread is next
        self._say = say  # shows a line
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

    def changed(self, kept: Seal | None, writes: int) -> Change | None:
        """Returns what has changed by itself in memory, since an update has left it so."""
        if kept is None or kept.writes != writes:
            return None
        with self.spending():
            return kept.changed()

    def found(self, what: str, *, stops: bool = False) -> None:
        """Says what was found; raises it where that ends the job."""
        text = f"corrupted values: {what}"
        self._times = self._times + 1 if text == self._last else 1
        self._count, self._last = self._count + 1, text
        if stops or self._action == "stop" or (self.heals and self._times > _MOST_TIMES):
            self.error = CorruptedValues(text)
            raise self.error
        self._say(text)

    def compare(
        self, what: str, step: int, copies: Mapping[str, Mapping[str, int]], own: str = ""
    ) -> tuple[list[str], list[str]]:
        """Says once which copies are wrong; returns the good and the wrong, if they are healed.

        Those that agree with most are right. The `copies` have by task the digests of its tensors,
        by their names; the task `own` says it only where it is wrong itself.
        """
        kinds = {task: (*taken.items(),) for task, taken in copies.items()}
        (most, times), *others = Counter(kinds.values()).most_common(2)
        clear = not others or others[0][1] < times
        good = [task for task, kind in kinds.items() if clear and kind == most]
        wrong = [task for task in copies if task not in good]
        key = f"{what} {min(copies)}"
        if not wrong:
            self._said.discard(key)
        elif key not in self._said and own in ("", *wrong):
            self._said.add(key)
            found = [n for n in copies[wrong[0]] if len({c.get(n) for c in copies.values()}) > 1]
            where = f"at step {step}, in {', '.join(found[:3])}{', ...' * (len(found) > 3)}"
            text = f"{', '.join(wrong)} has other values of {what} than {', '.join(good)} {where}"
            if not good:
                text = f"{' and '.join(wrong)} have different values of {what} {where}; nothing "
                text += "says who is right"
            self.found(text, stops=self.heals and not good)
        return (good, wrong) if self.heals and good else ([], [])

    def status(self) -> Mapping[str, float | str]:
        """Returns how much was found, and what last."""
        return {"corruptions": self._count, **({CORRUPTED: self._last} if self._last else {})}
