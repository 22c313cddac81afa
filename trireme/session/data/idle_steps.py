"""What a worker does that has no examples while others still have some."""

from __future__ import annotations

import time
from collections.abc import Callable

from trireme.ps.results import PushResult
from trireme.session.worker.worker import Worker

_FIRST_SECONDS = 0.02
_MOST_SECONDS = 0.5
_SHOW_SECONDS = 30.0


class IdleSteps:
    """Takes part without examples where others wait for this worker's updates; otherwise waits.

    A worker without examples sends an update of weight 0, which changes no values, where a round
    or a bound on staleness holds up others: to a round that has the update of another, as a round
    of such updates alone would be a step without examples. Where a round needs fewer updates than
    there are workers, those with examples go first.
    """

    def __init__(
        self,
        worker: Worker,
        flush: Callable[[], PushResult | None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._worker = worker
        self._flush = flush
        self._sleep = sleep
        self._times = 0  # in a row
        self._updates = 0  # since the last batch
        self._usual = 1  # and between the last two
        self._slept = self._shown = 0.0

    def updated(self) -> None:
        self._updates += 1

    def over(self) -> None:
        self._times = 0
        self._usual, self._updates = self._updates or self._usual, 0
        self._slept = self._shown = 0.0

    def end_epoch(self) -> None:
        """Exchanges local steps, where all workers do so in rounds: those that wait do it too."""
        setup = self._worker.setup
        if setup.outer is not None and setup.settings.rule.synchronous:
            self._exchange()

    def wait(self, *, awaited: bool) -> None:
        """Waits a little for what others do; the first time only for the worker's own update."""
        self._times += 1
        rule = self._worker.setup.settings.rule
        if self._times == 1:
            self._exchange()
        elif awaited or not (rule.staleness is None or rule.synchronous):
            self.make()
        else:
            self._pause()

    def make(self) -> None:
        """Makes an update without examples; in rounds as many as the program makes of a batch."""
        worker, setup = self._worker, self._worker.setup
        if self._exchange() and setup.outer is not None:
            return  # the round has the update that others wait for
        rule = setup.settings.rule
        if rule.synchronous and 0 < rule.aggregate < setup.settings.task.workers:
            self._pause()
        for _ in range(self._updates or self._usual if rule.synchronous else 1):
            if worker.should_stop:
                break
            worker.begin_step()
            setup.flat.zero_gradients()
            worker.update(0.0, (), counts=rule.synchronous)
        self._exchange()
        self._times = 1  # the next wait is short

    def _exchange(self) -> bool:
        if (result := self._flush()) is not None:
            self._worker.updated(result)
        return result is not None

    def _pause(self) -> None:
        with self._worker.lifecycle.liveness.excused("it waits for the examples of others"):
            seconds = min(_FIRST_SECONDS * 2 ** min(self._times, 10), _MOST_SECONDS)
            self._sleep(seconds)
        self._slept += seconds
        if self._slept - self._shown >= _SHOW_SECONDS:
            self._shown = self._slept
            self._worker.progress.waiting_for_update(
                "for the examples that they hold", ("other workers",), self._slept
            )
