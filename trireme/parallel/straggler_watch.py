"""Finds the processes that a process group waits for, which collectives do not report.

Each process publishes its position once a second. A process that has been in one step for long
looks for processes that are behind, or have published nothing new: they are slow, or stopped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from trireme.clock import Clock, MonotonicClock
from trireme.errors import TriremeError

_log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
PATIENCE_SECONDS = 5.0
SILENCE_SECONDS = 3.0
SAY_SECONDS = 10.0
JOIN_SECONDS = 2.0


class StepPosition(msgspec.Struct, frozen=True, array_like=True):
    """How far a process is.

    Attributes:
        step: the number of steps that it has made.
        inside: whether it is inside another step.
        beat: the number of times that it has published its position.
    """

    step: int
    inside: bool
    beat: int


def stragglers(
    mine: StepPosition, others: Mapping[int, tuple[StepPosition, float]]
) -> dict[int, str]:
    """Returns the ranks that a process inside a step waits for, each with the reason.

    Args:
        mine: the position of this process.
        others: the last position of each other process, and the seconds since it was published.
    """
    found: dict[int, str] = {}
    for rank, (place, silent) in sorted(others.items()):
        if silent >= SILENCE_SECONDS:
            found[rank] = f"has not reported for {silent:.0f} s"
        elif place.step < mine.step:
            found[rank] = f"has made {place.step} steps of {mine.step}"
        elif not place.inside and place.step == mine.step:
            found[rank] = "has not begun this step"
    return found


class StragglerWatch:
    """A thread that reports the processes that this process waits for.

    Args:
        rank, size: the rank of this process, and the number of processes.
        put, get: store bytes under a key, and read the bytes under a key.
        say: called on the thread with the reason, the names and the seconds waited.
        clock: measures the time waited.
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
        # The last position of each other process, and when it was seen first.
        self._seen: dict[int, tuple[StepPosition, float]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self.look()
        self._thread = threading.Thread(target=self._run, name="process-group-watch", daemon=True)
        self._thread.start()

    def step_began(self, step: int) -> None:
        """Notes that this process begins a step, after `step` completed steps."""
        self._step, self._inside, self._since = step, True, self._clock.now()

    def step_ended(self, step: int) -> None:
        """Notes that this process has completed `step` steps."""
        self._step, self._inside, self._since = step, False, self._clock.now()

    def close(self) -> None:
        """Ends the thread; waits only briefly, as the thread may hang in a read."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def look(self) -> None:
        """Publishes this process's position; reports the stragglers if it has waited long."""
        now = self._clock.now()
        self._beat += 1
        mine, waited = StepPosition(self._step, self._inside, self._beat), now - self._since
        self._put(f"at/{self._rank}", msgspec.msgpack.encode(mine))
        if not mine.inside or waited < BEAT_SECONDS:
            return
        for rank in range(self._size):
            data = self._get(f"at/{rank}") if rank != self._rank else None
            if data is not None:
                place = msgspec.msgpack.decode(data, type=StepPosition)
                if rank not in self._seen or self._seen[rank][0] != place:
                    self._seen[rank] = place, now
        if waited < PATIENCE_SECONDS or now - self._said < SAY_SECONDS:
            return
        found = stragglers(
            mine, {rank: (place, now - since) for rank, (place, since) in self._seen.items()}
        )
        if found:
            self._said = now
            reason = "; ".join(f"worker:{rank} {known}" for rank, known in found.items())
            self._say(reason, [f"worker:{rank}" for rank in found], waited)

    def _run(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self.look()
            except (TriremeError, RuntimeError, ValueError) as error:
                # The process group is closed or broken: the step itself fails and says more.
                _log.debug("no more watching: %s", error)
                return
