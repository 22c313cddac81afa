"""Counts, shows and records one worker's steps: counters, records and lines of progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from trireme.cluster.messages import MAX_LINE
from trireme.monitor.exporter import expose
from trireme.monitor.recording import UNSAVED, Recording, recording_of, records_directory
from trireme.plugins import not_installed
from trireme.ps.messages import Applied, Verdict
from trireme.session.observers.progress import pace_text
from trireme.session.result import StepResult
from trireme.session.worker.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

_SERVED = ("data", "compute", "push", "wait")
"""The phases of a step with parameter servers or other processes: waiting for a batch; forward and
backward; sending; waiting for the answer with the values."""
_ALONE = ("data", "compute", "apply")  # those of a lone process, which applies its updates itself

_REPORT_SECONDS = 0.5
_SILENCE_SECONDS = 30.0  # where steps are slow, one is shown after so long

_GAUGES = ("global_step", "loss", "examples_per_second", "memory_bytes")
_COUNTERS = ("examples", "staleness", "bytes_pushed", "bytes_pulled")  # the sums that are scraped


class Means:
    """The means per step since the last call that had further steps."""

    def __init__(self, began: float) -> None:
        self._before: dict[str, float] = {"time": began}
        self._means: dict[str, float] = {}

    def of(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the means, with the examples per second."""
        if sums["steps"] != self._before.get("steps"):
            grown = {name: total - self._before.get(name, 0) for name, total in sums.items()}
            self._before = dict(sums)
            self._means = {name: value / max(grown["steps"], 1) for name, value in grown.items()}
            self._means["examples_per_second"] = grown["examples"] / max(grown["time"], 1e-9)
        return self._means


class Recorder:
    """Counts and shows one worker's steps.

    Attributes:
        began: when this worker began, on `time.monotonic`.
        seconds: the seconds spent so far, by phase.
        observer: called with each phase, and when it began and ended, on `time.monotonic`.
    """

    def __init__(self, worker: Worker, *, own_loop: bool = False) -> None:
        task, settings = worker.task, worker.setup.settings
        self.applied = 0  # steps, by the verdict of the push that they went into
        self.stale = 0
        self.skipped = 0  # steps that made no update, as their loss was not finite
        self._worker = worker
        self._own_loop = own_loop
        self._settings = settings
        self._progress = worker.progress
        self._steps = 0
        self._examples = 0
        self._staleness = 0
        self._last: StepResult | None = None
        self.began = time.monotonic()
        self._ended: float | None = None
        self._report_at = 0.0
        self._show_at = self.began + _SILENCE_SECONDS
        self._pushes = {"applied": 0, "stale": 0}  # of several steps each, in some strategies
        self._reported: dict[str, float] = {}  # of the last status
        self._alone = not task.servers and task.group.size == 1
        self.seconds = dict.fromkeys(_ALONE if self._alone else _SERVED, 0.0)
        self.observer: Callable[[str, float, float], object] | None = None
        self._means = Means(self.began)
        self._process = psutil.Process()
        self._journal: Recording | None = None
        if task.records is not None or settings.run_dir is not None:
            records = task.records or records_directory(Path(settings.run_dir or "."))
            self._journal = recording_of(Path(records), task.name, task.job, settings.run_dir)
        if "curves" not in worker.observers and settings.run_dir is not None:
            worker.warn_as_chief(
                not_installed("TensorBoard, to which curves are written,", "dashboards")
            )
        self._exposition = expose((self.numbers,), task)
        if self._exposition is not None:
            self._progress.message(f"metrics: {self._exposition.address}")

    def step(self, result: StepResult, began: float, computed: float) -> None:
        self._steps += 1
        self._last = result
        self._examples += result.examples
        self._staleness += result.staleness
        if result.verdict is not None:
            self.count(result.verdict, result.steps)
        if not result.examples and self._settings.options.nan == "skip":
            self._skip(result)
        self.phase("compute", began, computed)
        times = self._worker.update_times
        if self._alone:
            self.phase("apply", times.push_began, times.push_ended)
        else:
            self.phase("push", times.push_began, times.push_ended)
            self.phase("wait", times.wait_began, times.wait_ended)
        if times.wait_began > times.push_ended:  # the next batch was made meanwhile
            self.phase("data", times.push_ended, times.wait_began)
        now, due = time.monotonic(), self._steps % self._settings.options.log_every == 0
        if due or now >= self._show_at:
            self._show_at = now + _SILENCE_SECONDS
            if not self._own_loop:
                self._progress.step(self._steps, self.job_examples, result)
        for observer in self._worker.observers.values():
            observer.after_step(self, result, due=due)
        if due and not self._own_loop:
            self._worker.buffers.publish()
        if now >= self._report_at:
            self._report_at = now + _REPORT_SECONDS
            self._report(result)

    def phase(self, name: str, began: float, ended: float) -> None:
        self.seconds[name] += ended - began
        if self.observer is not None:
            self.observer(name, began, ended)

    def _skip(self, result: StepResult) -> None:
        self.skipped += 1
        if self.skipped == 1:
            self._progress.warn(
                f"the loss of local step {self._steps} is {result.loss}: its update is left out "
                '(nan="skip"); their number is shown at the end'
            )

    def count(self, verdict: Verdict, steps: int) -> None:
        if isinstance(verdict, Applied):
            self.applied += steps
            self._pushes["applied"] += 1
        else:
            self.stale += steps
            self._pushes["stale"] += 1

    def numbers(self) -> dict[str, float]:
        """Returns what is scraped of this worker. Any thread may call it."""
        sums, storage = self.sums(), self._worker.storage
        return {
            **{name: self._reported.get(name, 0) for name in _GAUGES},
            **{name: sums[name] for name in _COUNTERS},
            **{f"pushes/{verdict}": count for verdict, count in self._pushes.items()},
            **{f"phase_seconds/{phase}": seconds for phase, seconds in self.seconds.items()},
            **{name: told for name, told in self._observed().items() if not isinstance(told, str)},
            "checkpoints/saved": storage.saved,
            "checkpoints/failed": storage.failed,
        }

    def _observed(self) -> dict[str, float | str]:
        every = [each.status() for each in self._worker.observers.values()]
        return {name: told for status in every for name, told in status.items()}

    @property
    def job_examples(self) -> float:
        """The number of examples in the job's updates since this worker joined.

        It is an estimate from the sizes of this worker's own batches.
        """
        steps = self._worker.global_step - self._worker.first_step
        mean = self._examples / max(self._steps, 1)
        return mean * steps * self._settings.batches_per_step

    def sums(self) -> dict[str, float]:
        backend = self._worker.backend
        return {
            "time": time.monotonic(),
            "steps": self._steps,
            "examples": self._examples,
            "staleness": self._staleness,
            "bytes_pushed": backend.bytes_sent,
            "bytes_pulled": backend.bytes_received,
            **self.seconds,
        }

    def values(self, result: StepResult) -> dict[str, float]:
        """Returns loss and metrics, as means over replicas that step together."""
        if self._own_loop:
            return {}  # it logs what it computes
        if self._worker.backend.group is None and not self._worker.lifecycle.is_chief:
            return {}
        group = self._worker.setup.process_group
        reports = group is None or group.reports_metrics
        own = {"loss": result.loss, **result.metrics} if reports else {}
        return self._worker.backend.mean(own, counts=reports)

    def _report(self, result: StepResult, *, last: bool = False) -> None:
        sums, worker = self.sums(), self._worker
        means = self._means.of(sums)
        numbers: dict[str, float] = {
            "step": self._steps,
            "global_step": result.global_step,
            "max_steps": self._settings.max_steps or 0,
            **({"loss": result.loss} if result.has_loss else {}),
            "examples_per_second": means["examples_per_second"],
            "applied": self.applied,
            "skipped": self.skipped,
            "stale": self.stale,
            "staleness": means["staleness"],
            "memory_bytes": self._process.memory_info().rss,
            "bytes_pushed": sums["bytes_pushed"],
            "bytes_pulled": sums["bytes_pulled"],
            **{f"{phase}_seconds": means[phase] for phase in self.seconds},
        }
        self._reported = numbers
        status: dict[str, float | str] = {**numbers, **self._observed()}
        if worker.storage.failed:
            status["checkpoints_failed"] = worker.storage.failed
        if worker.storage.alarm:
            status[UNSAVED] = worker.storage.alarm[:MAX_LINE]
        if self._exposition is not None:
            status["metrics"] = self._exposition.address
        worker.lifecycle.report(status)
        if self._journal is not None:
            status = {"state": worker.lifecycle.state, **status}
            self._journal.write(time.time(), status, self.seconds, last=last)

    def log(self, values: Mapping[str, float | Tensor], run: str, step: int | None = None) -> None:
        """Records numbers at a global step; None for the present one."""
        for observer in self._worker.observers.values():
            observer.log(values, run, self._worker.global_step if step is None else step)

    def evaluated(self, name: str, results: Mapping[str, float], step: int) -> None:
        self.log(results, name, step)
        shown = " ".join(f"{key} {value:.4f}" for key, value in results.items())
        self._progress.message(f"{name} at global step {step}: {shown}")

    def training_ended(self) -> None:
        """Ends the measurement of training; saving and evaluation follow."""
        self._ended = time.monotonic()
        if self._last is not None:
            self._report(self._last, last=True)
            self._last = None  # it holds tensors

    def finish(self) -> None:
        """Shows a summary of this worker, and as chief of the job, with the path of the curves."""
        worker, say = self._worker, self._progress.message
        if worker.task.draw is not None:  # no step was made
            return
        skipped = f", {self.skipped} skipped: the loss was not finite" if self.skipped else ""
        if worker.task.servers:
            stale = f", {self.stale} stale" if self.stale else ""
            applied = max(self.applied - self.skipped, 0)
            say(f"{self._steps} local steps: {applied} applied{stale}{skipped}")
            pushed, pulled = worker.backend.bytes_sent, worker.backend.bytes_received
            steps = max(self._steps, 1)
            say(
                f"bytes: {pushed:,} pushed, {pulled:,} pulled; "
                f"a step {pushed / steps:,.0f} and {pulled / steps:,.0f}"
            )
        elif self.skipped:
            say(f"{self._steps} steps{skipped}")
        if not worker.lifecycle.is_chief:
            return
        steps, begun = worker.global_step - worker.first_step, worker.checkpoints.restored_from
        if not steps and begun is not None and worker.lifecycle.interrupted is None:
            say(
                f"nothing was left to do: step {begun} is the last one; continue with "
                "more steps, or start again in another run directory"
            )
        for observer in worker.observers.values():
            observer.finish()
        seconds = (self._ended or time.monotonic()) - self.began
        pace = pace_text(self.job_examples / max(seconds, 1e-9))
        say(f"{steps} global steps in {seconds:.1f} s, {pace}")

    def close(self) -> None:
        for each in (*self._worker.observers.values(), self._journal, self._exposition):
            if each is not None:
                each.close()
