"""For whom a process of a gang waits: what collectives do not say.

Each process leaves where it is for the others, once a second. Whoever has been in one step for long
looks who is not as far, or has left nothing new: that one is stopped, or slow.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from trireme.clock import Clock, MonotonicClock
from trireme.errors import TriremeError

__all__ = ["Place", "Watch", "waited_for"]

_log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
PATIENCE_SECONDS = 5.0
SILENCE_SECONDS = 3.0
SAY_SECONDS = 10.0
JOIN_SECONDS = 2.0


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a process is.

    Attributes:
        step: how many steps it has made.
        inside: whether it is making another one.
        beat: how often it has said so.
    """

    step: int
    inside: bool
    beat: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was last read of another process, and when that was new."""

    place: Place
    at: float


def waited_for(
    mine: Place, others: Mapping[int, Place], silent: Mapping[int, float]
) -> dict[int, str]:
    """Returns the ranks that a process in the middle of a step waits for, with what is known.

    Args:
        mine: where this process is.
        others: where the others said that they are.
        silent: for each of them, for how many seconds it has said nothing new.
    """
    found: dict[int, str] = {}
    for rank, place in sorted(others.items()):
        if silent[rank] >= SILENCE_SECONDS:
            found[rank] = f"says nothing for {silent[rank]:.0f} s"
        elif place.step < mine.step:
            found[rank] = f"has made {place.step} steps of {mine.step}"
        elif not place.inside and place.step == mine.step:
            found[rank] = "has not begun this step"
    return found


class Watch:
    """A thread that says for whom this process waits.

    Args:
        rank, size: this process's, and how many there are.
        put, get: leave bytes under a key, and read what others have left.
        say: told the reason, the names and the seconds, from the thread.
        clock: of what is waited.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        put: Callable[[str, bytes], None],
        get: Callable[[str], bytes | None],
        say: Callable[[str, Sequence[str], float], None],
        clock: Clock | None = None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._put = put
        self._get = get
        self._say = say
        self._clock = clock or MonotonicClock()
        self._step, self._inside, self._since = 0, False, self._clock.now()
        self._beat = 0
        self._said = float("-inf")
        self._seen: dict[int, _Seen] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to watch."""
        self.look()
        self._thread = threading.Thread(target=self._run, name="gang-watch", daemon=True)
        self._thread.start()

    def begins(self, step: int) -> None:
        """This process begins a step, after having made `step` of them."""
        self._step, self._inside, self._since = step, True, self._clock.now()

    def made(self, step: int) -> None:
        """It has made one more."""
        self._step, self._inside, self._since = step, False, self._clock.now()

    def close(self) -> None:
        """Ends the thread, and waits for that, but not for long: it may read in vain."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def look(self) -> None:
        """Leaves where this process is, and says for whom it waits if it has waited long."""
        now = self._clock.now()
        self._beat += 1
        mine, waited = Place(self._step, self._inside, self._beat), now - self._since
        self._put(f"at/{self._rank}", msgspec.msgpack.encode(mine))
        if not mine.inside or waited < BEAT_SECONDS:
            return
        others = self._others(now)
        if waited < PATIENCE_SECONDS or now - self._said < SAY_SECONDS:
            return
        found = waited_for(
            mine,
            {rank: seen.place for rank, seen in others.items()},
            {rank: now - seen.at for rank, seen in others.items()},
        )
        if found:
            self._said = now
            reason = "; ".join(f"worker:{rank} {known}" for rank, known in found.items())
            self._say(reason, [f"worker:{rank}" for rank in found], waited)

    def _others(self, now: float) -> dict[int, _Seen]:
        for rank in range(self._size):
            data = self._get(f"at/{rank}") if rank != self._rank else None
            if data is not None:
                place = msgspec.msgpack.decode(data, type=Place)
                if rank not in self._seen or self._seen[rank].place.beat != place.beat:
                    self._seen[rank] = _Seen(place, now)
        return self._seen

    def _run(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self.look()
            except (TriremeError, RuntimeError, ValueError) as error:
                # The gang is closed, or broken: the step itself will fail of that, and say more.
                _log.debug("no more watching: %s", error)
                return
