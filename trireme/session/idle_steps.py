"""What a worker does that has no examples while others still have some."""

from __future__ import annotations

import time
from collections.abc import Callable

from trireme.session.worker import Worker

_FIRST_SECONDS = 0.02
_MOST_SECONDS = 0.5
_TELL_SECONDS = 30.0


class IdleSteps:
    """Takes part without examples where others wait for this worker's updates; otherwise waits.

    A round waits for the updates of its workers, and a bound on staleness holds up those that are
    ahead. A worker without examples sends an update of weight 0, which changes no values. Where a
    round needs fewer updates than there are workers, it lets those with examples go first. In
    process groups all replicas have as many steps, so that there is nothing to wait for.

    Args:
        worker: the worker.
        flush: waits for the update that is under way, and exchanges local ones.
        sleep: waits some seconds.
    """

    def __init__(
        self,
        worker: Worker,
        flush: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._worker = worker
        self._flush = flush
        self._sleep = sleep
        self._times = 0  # in a row
        self._slept = self._told = 0.0

    def over(self) -> None:
        """Notes that the worker has examples again."""
        self._times = 0
        self._slept = self._told = 0.0

    def wait(self) -> None:
        """Waits a little for what others do; the first time only for the worker's own update."""
        self._times += 1
        if self._times == 1:
            self._flush()
        elif self._worker.setup.settings.rule.staleness is not None:
            self.make()
        else:
            self._pause()

    def make(self) -> None:
        """Makes a step without examples, where others may not get far ahead of this worker."""
        worker, setup = self._worker, self._worker.setup
        rule = setup.settings.rule
        if rule.staleness is None:
            return
        if rule.synchronous and rule.aggregate < setup.settings.task.workers:
            self._pause()
        worker.begin_step()
        setup.flat.zero_gradients()
        worker.update(0.0, ())
        self._flush()

    def _pause(self) -> None:
        with self._worker.lifecycle.liveness.excused("it waits for the examples of others"):
            seconds = min(_FIRST_SECONDS * 2 ** min(self._times, 10), _MOST_SECONDS)
            self._sleep(seconds)
        self._slept += seconds
        if self._slept - self._told >= _TELL_SECONDS:
            self._told = self._slept
            self._worker.progress.waiting_for_update(
                "for the examples that they hold", ("other workers",), self._slept
            )
