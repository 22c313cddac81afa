"""Finds the processes that a process group waits for, and says when it waits in vain.

Collectives do not report which process they wait for, and no exception of this process interrupts
them. Each process publishes its position once a second. A process that has waited for long looks
for those that are behind, or have published nothing new. A process that holds the interpreter lock
publishes nothing; the others of its host see that it uses the processor, and say so for it. Where
the wait is in vain the process group is broken: all processes learn the same reason, and the caller
interrupts their collectives.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from trireme.errors import ConfigurationError, JobFailed, TriremeError
from trireme.job_config import Timeouts
from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.wire.clock import Clock, MonotonicClock

_log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
PATIENCE_SECONDS = 5.0
SILENCE_SECONDS = 3.0
SAY_SECONDS = 10.0
JOIN_SECONDS = 2.0
END_SECONDS = 2.0
"""How long a process is in a step that another one does not make, until that is an error."""
_SOON = 0.02
_SHARE = 0.1
"""The share of a core above which a silent process computes. Each thread that waits for the
interpreter lock wakes up 200 times a second, and uses up to a hundredth."""


class StepPosition(msgspec.Struct, frozen=True, array_like=True):
    """How far a process is."""

    step: int  # the number of steps that it has made
    inside: bool  # whether it is inside another step
    beat: int  # the number of times that it has published its position
    ended: bool = False  # whether it has ended its training, and waits until the others have
    excuse: str = ""  # why no step can be expected of it now; "" where one can be
    place: str = ""  # the line that its main thread runs; "" where that is not known
    action: str = ""  # what it does with all others, in place of a step; "" for a step
    joins: bool = False  # whether it takes part in something outside of steps, such as a save

    @property
    def waits_for_others(self) -> bool:
        return self.inside or self.ended or self.joins

    @property
    def place_in_loop(self) -> tuple[int, bool, bool, str]:
        """What changes when the process makes progress."""
        return self.step, self.inside, self.ended, self.action


class Seen(msgspec.Struct, frozen=True):
    """What is known of another process: its last position, and several times by the clock."""

    position: StepPosition
    heard: float  # when the position was first seen
    still: float  # since when it is in that place without an excuse
    alive: float  # when the position was first seen, or the process was last seen to compute
    used: tuple[float, float] | None = None  # the processor's seconds, and when


class Broken(msgspec.Struct, frozen=True, array_like=True):
    """Why a process group is broken."""

    text: str  # the reason, in a sentence
    usage: bool = False  # whether the program is wrong, so that it would happen again

    def error(self) -> TriremeError:
        """Returns the error that each process raises."""
        return ConfigurationError(self.text) if self.usage else JobFailed(self.text)


def stragglers(mine: StepPosition, others: Mapping[int, Seen], now: float) -> dict[int, str]:
    """Returns the ranks that a process waits for, each with the reason."""
    found: dict[int, str] = {}
    for rank, seen in sorted(others.items()):
        place = seen.position
        if now - seen.heard >= SILENCE_SECONDS:
            computes = ", and uses the processor" if now - seen.alive < SILENCE_SECONDS else ""
            found[rank] = f"has not reported for {now - seen.heard:.0f} s{computes}"
        elif place.ended and not mine.joins:
            found[rank] = "has ended its training"
        elif place.step < mine.step:
            found[rank] = f"has made {place.step} steps of {mine.step}"
        elif mine.inside and not place.inside and place.step == mine.step:
            found[rank] = "has not begun this step"
    return found


def broken_by(
    rank: int,
    mine: StepPosition,
    since: float,
    others: Mapping[int, Seen],
    timeouts: Timeouts,
    now: float,
) -> Broken | None:
    """Returns why a process waits in vain; None where it may go on waiting, or does not wait."""
    waited = now - since
    if not mine.waits_for_others:
        return None
    for other, seen in sorted(others.items()):
        place = seen.position
        behind = place.ended and place.step <= mine.step
        if mine.inside and behind and waited >= END_SECONDS:
            return _unequal(other, place.step, rank, mine.step)
        stays = now - seen.still
        if mine.ended and place.inside and place.step >= mine.step and stays >= END_SECONDS:
            return _unequal(rank, mine.step, other, place.step)
        apart = mine.inside and place.inside and place.action != mine.action
        if apart and place.step == mine.step and min(waited, stays) >= END_SECONDS:
            first, second = (rank, other) if mine.action else (other, rank)
            return _unequal(first, mine.step, second, mine.step, mine.action or place.action)
    heartbeat, progress = timeouts.heartbeat_timeout, timeouts.progress_timeout
    silent = {n: now - seen.alive for n, seen in others.items() if now - seen.alive >= heartbeat}
    if silent and waited >= heartbeat:
        names = ", ".join(f"worker:{other}" for other in sorted(silent))
        longest = max(silent.values())
        return Broken(
            f"{names} sent nothing for {longest:.0f} s (--heartbeat-timeout): stopped, hanging, on "
            "a host that is cut off, or alone on its host in a call that holds the interpreter lock"
        )
    excused = bool(mine.excuse) and not mine.ended
    if not progress or excused or waited < progress:
        return None
    training = {other: seen for other, seen in others.items() if not seen.position.ended}
    if any(now - seen.still < progress for seen in training.values()):
        return None
    lacks = "ended its training" if mine.ended else f"begun step {mine.step + 1}"
    doing = [
        f"worker:{other} has not {lacks}"
        + (f", its main thread is at {place.place}" if place.place else "")
        for other, place in sorted((other, seen.position) for other, seen in training.items())
        if not place.inside
    ]
    why = "; ".join(doing) or f"no process has completed step {mine.step + 1}"
    return Broken(f"no step was made for {waited:.0f} s (--progress-timeout): {why}")


def _unequal(
    rank: int, made: int, other: int, step: int, does: str = "has ended its training"
) -> Broken:
    return Broken(
        f"rank {rank} {does} after {made} steps, and rank {other} makes step "
        f"{step + 1}: all processes make each step together, so every process must make the same "
        "number of steps and leave out none",
        usage=True,
    )


class StragglerWatch:
    """Threads that report the processes that this process waits for, and break a wait in vain.

    One thread reads and writes the store, which may not answer where the process that serves it is
    stopped; the other one decides.
    """

    def __init__(
        self,
        group: TorchProcessGroup,
        say: Callable[[str, Sequence[str], float], None],
        *,
        timeouts: Timeouts,
        doing: Callable[[], tuple[str, str]] = lambda: ("", ""),
        used: Callable[[int], float | None] = lambda rank: None,
        clock: Clock | None = None,
    ) -> None:
        self._group = group
        self._say = say
        self._timeouts = timeouts
        self._doing = doing
        self._used = used
        self._clock = clock or MonotonicClock()
        self._mine = StepPosition(0, False, 0)  # without what `look` adds
        self._since = self._clock.now()
        self._beat = 0
        self._excuse = ""
        self._asked: float | None = None  # since when the store has not answered
        self._looked = self._judged = self._since  # when that was last done
        self._said = float("-inf")
        self._seen: dict[int, Seen] = {}
        self._changed = threading.Event()  # there is something to look at, or to say
        self._news = threading.Condition()  # that one of these three has changed
        self._broken: Broken | None = None
        self._met = False  # all have ended
        self._over = False
        self._published = False  # all can read why it is broken
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the threads."""
        self.look()
        for run, name in ((self._run, "process-group-watch"), (self._run_judge, "process-judge")):
            self._threads.append(threading.Thread(target=run, name=name, daemon=True))
            self._threads[-1].start()

    def step_began(self, step: int) -> None:
        """Notes that this process begins a step, after `step` completed steps."""
        self.check()
        self._move(step=step, inside=True)

    def step_ended(self, step: int) -> None:
        """Notes that this process has completed `step` steps."""
        self._move(step=step, inside=False)

    def _move(self, **changes: Any) -> None:
        self._mine, self._since = replace(self._mine, **changes), self._clock.now()

    @contextmanager
    def waiting(self, action: str = "") -> Iterator[None]:
        """Notes that this process waits for others in the block; an action stands for a step."""
        before = self._mine
        if not before.waits_for_others:
            self._move(inside=bool(action), action=action, joins=not action)
        try:
            yield
        finally:
            self._mine = before

    def ended(self, step: int) -> None:
        """Notes that this process has ended its training."""
        self._move(step=step, inside=False, ended=True)
        self._changed.set()

    def meet_at_the_end(self) -> None:
        """Waits until every process has ended its training."""
        if self._group.size == 1 or not self._threads:
            return
        with self._news:
            self._news.wait_for(lambda: self._met or self._broken)
        self.check()

    def check(self) -> None:
        """Returns where the process group is whole, as far as this process knows."""
        if self._broken is not None:
            raise self._broken.error()

    def reason(self, seconds: float) -> TriremeError | None:
        """Returns why a collective has failed, if the watch knows, or learns it in some seconds."""
        self._changed.set()
        if self._threads:
            with self._news:
                self._news.wait_for(lambda: self._broken, seconds)
        return None if self._broken is None else self._broken.error()

    def close(self) -> None:
        """Ends the threads; waits only briefly, as one may hang in a read."""
        with self._news:
            self._over = True
            self._news.notify_all()
        self._changed.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)

    def look(self) -> None:
        """Publishes this process's position, and reads those of the others if it waits."""
        self._asked = self._clock.now()
        self._beat += 1
        self._excuse, place = self._doing()
        mine = replace(self._mine, beat=self._beat, excuse=self._excuse, place=place)
        self._group.put(f"at/{self._group.rank}", msgspec.msgpack.encode(mine))
        self._read_reason()
        waits = mine.ended or (mine.waits_for_others and self._asked - self._since >= BEAT_SECONDS)
        for rank in range(self._group.size) if waits else ():
            data = self._group.get(f"at/{rank}") if rank != self._group.rank else None
            if data is not None:
                self._note(rank, msgspec.msgpack.decode(data, type=StepPosition))
        ended = [seen.position.ended for seen in self._seen.values()]
        if mine.ended and sum(ended) == self._group.size - 1:
            with self._news:
                self._met = True
                self._news.notify_all()
        self._looked, self._asked = self._clock.now(), None

    def _note(self, rank: int, place: StepPosition) -> None:
        now, known = self._clock.now(), self._seen.get(rank)
        if known is not None and place.beat == known.position.beat:
            if now - known.heard > BEAT_SECONDS:
                self._ask(rank, known)
            return
        still = now
        if known and not place.excuse and place.place_in_loop == known.position.place_in_loop:
            still = known.still
        with self._news:
            self._seen[rank] = Seen(place, now, still, now)

    def _ask(self, rank: int, known: Seen) -> None:
        """Learns whether a silent process computes: of the kernel, or of others on its host."""
        used, key = self._used(rank), f"used/{rank}"
        if used is not None:
            self._group.put(key, msgspec.msgpack.encode(used))
        elif (data := self._group.get(key)) is not None:
            used = msgspec.msgpack.decode(data, type=float)
        if used is None:
            return
        now, before = self._clock.now(), known.used
        computes = before is not None and used - before[0] >= _SHARE * (now - before[1])
        with self._news:
            self._seen[rank] = replace(
                known, used=(used, now), alive=now if computes else known.alive
            )

    def _read_reason(self) -> None:
        mine, data = self._broken, self._group.get(BROKEN)
        if data is not None:
            self._published = True
            self._break(msgspec.msgpack.decode(data, type=Broken))
        elif mine is not None:
            self._group.put(BROKEN, msgspec.msgpack.encode(mine))
            self._published = True

    def judge(self) -> None:
        """Reports the processes that this one waits for; breaks the group if it waits in vain."""
        now = self._clock.now()
        stalled, self._judged = now - self._judged >= SILENCE_SECONDS, now
        if stalled and self._asked is not None:
            self._asked = now
        if stalled:
            return  # this process was stopped itself, and has not looked since
        with self._news:
            seen = dict(self._seen)
        since, asked = self._since, self._asked
        waited = now - since
        mine = replace(self._mine, excuse=self._excuse)
        if self._met or self._broken is not None:
            return
        if asked is not None and now - asked >= self._timeouts.heartbeat_timeout:
            if mine.waits_for_others:
                server = "worker:0, or else what serves the store of the processes,"
                silence = f"{now - asked:.0f} s (--heartbeat-timeout)"
                self._break(Broken(f"{server} sent nothing for {silence}: stopped, or hanging"))
            return
        if now - self._looked < SILENCE_SECONDS:  # else what was seen is old
            found = broken_by(self._group.rank, mine, since, seen, self._timeouts, now)
            if found is not None:
                self._break(found)
                return
        long = waited >= PATIENCE_SECONDS and now - self._said >= SAY_SECONDS
        if long and mine.waits_for_others and not mine.ended:
            late = stragglers(mine, seen, now)
            if late:
                self._said = now
                reason = "; ".join(f"worker:{rank} {known}" for rank, known in late.items())
                self._say(reason, [f"worker:{rank}" for rank in late], waited)

    def _break(self, why: Broken) -> None:
        with self._news:
            self._broken = self._broken or why
            self._news.notify_all()
        self._changed.set()

    def _run(self) -> None:
        while not self._over:
            try:
                self.look()
            except (TriremeError, RuntimeError, ValueError) as error:
                # The process group is closed or broken: the step itself fails and says more.
                _log.debug("no more watching: %s", error)
                return
            if self._broken is not None and self._published:
                return  # what serves the store may end now
            meets = self._mine.ended and not self._met
            soon = _SOON * self._group.size if meets else BEAT_SECONDS
            self._changed.wait(min(BEAT_SECONDS, soon))
            self._changed.clear()

    def _run_judge(self) -> None:
        while not self._over:
            self.judge()
            with self._news:
                self._news.wait_for(lambda: self._broken or self._over, BEAT_SECONDS)
                if self._broken is None:
                    continue
                # For the other thread to tell the others.
                self._news.wait_for(lambda: self._over, TELL_SECONDS)
            self._group.interrupt()
            return


BROKEN = "broken"  # the key of the reason why the process group is broken
TELL_SECONDS = 0.5
