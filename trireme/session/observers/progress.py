"""The progress of a run as lines: states, waits, steps and messages.

joining the coordinator at 10.0.0.1:4210
waiting for worker:1 (294 s left)
training
step 1300 (global 2600/4000) loss 0.123 accuracy 0.97 12,345 examples/s
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from trireme.wire.clock import Clock, MonotonicClock

if TYPE_CHECKING:
    from trireme.session.result import StepResult

_log = logging.getLogger(__name__)

_REPEAT_SECONDS = 5.0  # until a wait for the same tasks is shown again
_NAMES_SHOWN = 6


class Progress:
    """Writes the progress of a session to a stream; without one it only logs warnings."""

    def __init__(
        self,
        stream: IO[str] | None = None,
        clock: Clock | None = None,
        *,
        max_steps: int | None = None,
    ) -> None:
        self._stream = stream
        self._clock = clock or MonotonicClock()
        self._end = "" if max_steps is None else f"/{max_steps}"
        self._mark: tuple[float, float] | None = None  # the time and the examples of the last line
        self._waiting_for: tuple[str, ...] = ()
        self._waiting_since = 0.0

    def state(self, name: str, detail: str = "") -> None:
        """Shows a new state of the session, such as `restoring`, with a detail: `step 1200`."""
        self._waiting_for = ()
        self.message(f"{name} {detail}".rstrip())

    def waiting(self, names: Sequence[str], seconds_left: float) -> None:
        """Shows the tasks that the cluster still waits for. May be called at any rate."""
        now = self._clock.now()
        news = tuple(names) != self._waiting_for
        if names and (news or now - self._waiting_since >= _REPEAT_SECONDS):
            self._waiting_for, self._waiting_since = tuple(names), now
            self.message(_waiting_text(names, f"{max(seconds_left, 0):.0f} s left"))

    def waiting_for_update(self, reason: str, names: Sequence[str], seconds: float) -> None:
        """Shows that an answer is withheld for `seconds` so far, because of these tasks."""
        self.message(_waiting_text(names, f"{reason}; {seconds:.0f} s so far"))

    def step(self, step: int, examples: float, result: StepResult) -> None:
        """Shows this worker's step of a number; the growth of `examples` gives the pace."""
        if self._stream is None:  # a loss is not waited for
            return
        parts = [f"step {step} (global {result.global_step}{self._end})"]
        if result.has_loss:
            parts.append(f"loss {result.loss:.4g}")
        parts += [f"{name} {value:.4g}" for name, value in result.metrics.items()]
        now = self._clock.now()
        then, before = self._mark or (now, examples)
        self._mark = now, examples
        if now > then and examples >= before:  # not back at a checkpoint
            parts.append(pace_text((examples - before) / (now - then)))
        self.message(" ".join(parts))

    def message(self, text: str) -> None:
        if self._stream is not None:
            print(text, file=self._stream, flush=True)

    def warn(self, text: str) -> None:
        if self._stream is None:
            _log.warning(text)
        self.message(f"warning: {text}")


def pace_text(per_second: float) -> str:
    """Returns a pace, such as `12,345 examples/s`."""
    return f"{per_second:,.{0 if per_second >= 10 else 1}f} examples/s"


def _waiting_text(names: Sequence[str], remark: str) -> str:
    names = list(dict.fromkeys(names))  # a server has several shards
    shown = ", ".join(names[:_NAMES_SHOWN]) or "the others"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"waiting for {shown}{more} ({remark})"
