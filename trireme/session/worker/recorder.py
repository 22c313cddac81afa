"""Counts, displays and records one worker's steps: counters, curves and lines of progress."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from trireme.cluster.messages import MAX_LINE
from trireme.errors import NonFiniteError
from trireme.location import RemotePath
from trireme.metrics import COUNT_BUCKETS, BucketCounts
from trireme.monitor.board import Board, open_board
from trireme.monitor.job_state import UNSAVED
from trireme.monitor.prometheus import expose
from trireme.monitor.records import Record, RecordWriter, begin_here, records_directory
from trireme.plugins import not_installed
from trireme.ps.messages import Applied, Verdict
from trireme.session.observers.phases import ALONE, SERVED, Phases
from trireme.session.observers.progress import ProgressRow, summary_line
from trireme.session.result import StepResult
from trireme.session.worker.worker import Worker
from trireme.stores import Uploads, open_store

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

MOST_SKIPS = 100
"""A run ends after this many steps in a row whose loss is not finite."""

_FEW = 10
_AGAINST_NAN = (
    "Lower the learning rate, clip the gradient (clip_norm=1.0), look for bad examples, or go on "
    "from an earlier checkpoint (resume=PATH)"
)

_REPORT_SECONDS = 0.5
_SHOW_SECONDS = 0.1

_STATUS_METRICS = {
    "global_step": "The global step of the values",
    "loss": "The loss of the newest batch",
    "examples_per_second": "Examples that this worker computes each second",
    "memory_bytes": "Resident memory of the process",
    "bytes_pushed_total": "Bytes of updates sent to the servers, as packed",
    "bytes_pulled_total": "Bytes of values received from the servers",
}
"""The fields of a worker's status that are also gauges, or counters (which end in `_total`)."""


class Recorder:
    """Counts and shows one worker's steps, and as chief writes the curves."""

    def __init__(self, worker: Worker, *, own_loop: bool = False) -> None:
        task, settings = worker.task, worker.setup.settings
        self.applied = 0  # steps, by the verdict of the push that they went into
        self.stale = 0
        self.skipped = 0  # steps that made no update, as their loss was not finite
        self._worker = worker
        self._own_loop = own_loop
        self._settings = settings
        self._progress = worker.progress
        self._directory = None if settings.run_dir is None else settings.run_dir / "tensorboard"
        self._board: Board | None = None
        self._steps = 0
        self._in_a_row = 0  # consecutive skipped steps
        self._last: StepResult | None = None
        self._first_step = worker.global_step
        self._began = time.monotonic()
        self._ended: float | None = None
        self._report_at = 0.0
        self._show_at = 0.0
        self._shown = 0  # the last step that was shown
        self._staleness = 0
        self._stalenesses: list[int] = []  # not counted yet
        self._staleness_counts = BucketCounts(COUNT_BUCKETS)
        self._examples = 0
        self._pushes = {"applied": 0, "stale": 0}  # of several steps each, in some strategies
        self._reported: dict[str, float] = {}  # of the last status
        self._alone = not task.servers and task.group.size == 1
        self.phases = Phases(ALONE if self._alone else SERVED)
        self._sums: dict[str, dict[str, float]] = {}  # at the last `_means`, by its reader
        self._last_means: dict[str, dict[str, float]] = {}
        self._process = psutil.Process()
        self._journal: RecordWriter | None = None
        if task.records is not None or settings.run_dir is not None:
            records = task.records or records_directory(Path(settings.run_dir or "."))
            begun = begin_here(task.name, task.job, settings.run_dir)
            self._journal = RecordWriter(Path(records), begun)
        self._flushed = worker.storage.submitted
        self._mirror = None if settings.remote is None else self._mirrored(settings.remote)
        self._exposition = expose(
            (self.phases, self), task.name, task.config.output.metrics_host, task.scrape_port
        )
        if self._exposition is not None:
            self._progress.message(f"metrics: {self._exposition.address}")

    def _mirrored(self, remote: RemotePath) -> Uploads:
        """Uploads what the chief writes; the launcher uploads the records of its tasks."""
        assert self._settings.run_dir is not None
        names = ["tensorboard", "traces", "pipeline.png"]
        if self._worker.task.records is None:
            names.append("records")
        lifecycle = self._worker.lifecycle
        return open_store(remote).mirror(self._settings.run_dir, names, lambda: lifecycle.is_chief)

    # -- each step ------------------------------------------------------------------------------

    def step(self, result: StepResult, began: float, computed: float) -> None:
        """Counts a step; shows and records it if that is due."""
        self._steps += 1
        self._last = result
        self._examples += result.examples
        if result.verdict is not None:
            self.count(result.verdict, result.steps)
        if result.examples:
            self._in_a_row = 0
        elif self._settings.options.nan == "skip":
            self._skip(result)
        self._staleness += result.staleness
        self._stalenesses.append(result.staleness)
        self._add_phases(began, computed)
        now, due = time.monotonic(), self._steps % self._settings.options.log_every == 0
        if due or now >= self._show_at:
            self._show_at = now + _SHOW_SECONDS
            self._show(result)
        if due:
            self._record(result)
        if now >= self._report_at:
            self._report_at = now + _REPORT_SECONDS
            self._report(result)
        if (saved := self._worker.storage.submitted) != self._flushed:
            self._flushed = saved
            if self._board is not None:  # a run that is resumed there has the curves before it
                self._board.flush(timeout=0.0)

    def _skip(self, result: StepResult) -> None:
        self.skipped += 1
        self._in_a_row += 1
        if self.skipped == 1:
            self._progress.warn(
                f"the loss of local step {self._steps} is {result.loss}: its update is left out "
                '(nan="skip"); their number is shown at the end'
            )
        if self._in_a_row >= MOST_SKIPS:
            raise NonFiniteError(
                f"{self._in_a_row} steps in a row had a loss that is not finite, and made no "
                f"update: nothing is learned any more. {_AGAINST_NAN}"
            )

    def check_progress(self) -> None:
        """Checks, at the end, that not all steps were left out."""
        fewest = 1 if self._worker.task.workers == 1 else _FEW
        if self.skipped == self._steps >= fewest:
            raise NonFiniteError(
                f"none of the {self._steps} steps made an update: each had a loss that is not "
                f"finite, and was left out. {_AGAINST_NAN}"
            )

    def _show(self, result: StepResult) -> None:
        if self._own_loop:
            return
        self._settle()
        self._shown = self._steps
        self._progress.step(ProgressRow(self._steps, result.global_step, self.job_examples, result))

    def _add_phases(self, began: float, computed: float) -> None:
        add, times = self.phases.add, self._worker.update_times
        add(("compute", began, computed))
        if self._alone:
            add(("apply", times.push_began, times.push_ended))
        else:
            add(("push", times.push_began, times.push_ended))
            add(("wait", times.wait_began, times.wait_ended))
        if times.wait_began > times.push_ended:  # the next batch was made meanwhile
            add(("data", times.push_ended, times.wait_began))

    def count(self, verdict: Verdict, steps: int) -> None:
        if isinstance(verdict, Applied):
            self.applied += steps
            self._pushes["applied"] += 1
        else:
            self.stale += steps
            self._pushes["stale"] += 1

    def _settle(self) -> None:
        """Counts what is not counted yet; doing so at each step would cost more."""
        self.phases.settle()
        self._staleness_counts.observe_all(self._stalenesses)
        self._stalenesses.clear()

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        text = "Examples computed by this worker"
        yield CounterMetricFamily("trireme_examples_total", text, self._examples)
        for name, text in _STATUS_METRICS.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(f"trireme_{name}", text, self._reported.get(name.removesuffix("_total"), 0))
        pushes = CounterMetricFamily(
            "trireme_pushes_total", "Pushes by verdict", labels=["verdict"]
        )
        for verdict, count in self._pushes.items():
            pushes.add_metric([verdict], count)
        text = "Checkpoints by what became of them"
        saves = CounterMetricFamily("trireme_checkpoints_total", text, labels=["outcome"])
        saves.add_metric(["saved"], self._worker.storage.saved)
        saves.add_metric(["failed"], self._worker.storage.failed)
        yield from (pushes, saves)
        text, counts = "Updates between a pull and its push", self._staleness_counts
        buckets = [*counts.cumulative.items()]
        yield HistogramMetricFamily("trireme_push_staleness", text, buckets, counts.sum)

    @property
    def job_examples(self) -> float:
        """The number of examples in the job's updates since this worker joined.

        It is an estimate from the sizes of this worker's own batches.
        """
        if not self._steps:
            return 0.0
        steps = self._worker.global_step - self._first_step
        return self._examples / self._steps * steps * self._settings.batches_per_step

    def _means(self, reader: str) -> dict[str, float]:
        """Returns the means per step since the reader's last call, with the examples per second.

        Without a step since then, they are those of the last call.
        """
        backend, before = self._worker.backend, self._sums.get(reader, {"time": self._began})
        now = {
            "time": time.monotonic(),
            "steps": self._steps,
            "examples": self._examples,
            "staleness": self._staleness,
            "pushed": backend.bytes_sent,
            "pulled": backend.bytes_received,
            **self.phases.totals,
        }
        if now["steps"] == before.get("steps"):
            return self._last_means[reader]
        self._sums[reader] = now
        grown = {name: total - before.get(name, 0) for name, total in now.items()}
        means = {name: growth / max(grown["steps"], 1) for name, growth in grown.items()}
        means["examples_per_second"] = grown["examples"] / max(grown["time"], 1e-9)
        self._last_means[reader] = means
        return means

    def _record(self, result: StepResult) -> None:
        means, values, sent = self._means("curves"), self._values(result), {}
        if self._worker.task.servers:
            sent = {f"bytes/{name}_per_step": means[name] for name in ("pushed", "pulled")}
        if self._worker.lifecycle.is_chief and self._directory is not None:
            self.log(
                {
                    **values,
                    **self._learning_rates(),
                    "speed/examples_per_second": means["examples_per_second"],
                    **{f"speed/{phase}_seconds": means[phase] for phase in self.phases.totals},
                    "updates/staleness": means["staleness"],
                    "updates/applied_total": float(self.applied),
                    "updates/stale_total": float(self.stale),
                    **sent,
                    **self._lags(),
                },
                "train",
            )
        if not self._own_loop:
            self._worker.buffers.publish()

    def _values(self, result: StepResult) -> dict[str, float]:
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
        self._settle()
        means, backend = self._means("status"), self._worker.backend
        status: dict[str, float | str] = {
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
            "bytes_pushed": backend.bytes_sent,
            "bytes_pulled": backend.bytes_received,
            **{f"{phase}_seconds": means[phase] for phase in self.phases.totals},
            **backend.tables_status(),
        }
        if self._worker.storage.failed:
            status["checkpoints_failed"] = self._worker.storage.failed
        if self._worker.storage.alarm:
            status[UNSAVED] = self._worker.storage.alarm[:MAX_LINE]
        if self._exposition is not None:
            status["metrics"] = self._exposition.address
        numbers = {name: value for name, value in status.items() if not isinstance(value, str)}
        self._reported |= numbers
        self._worker.lifecycle.report(status)
        if self._journal is not None:
            record = Record(
                time=time.time(),
                status={"state": self._worker.lifecycle.state, **status},
                seconds=self.phases.totals,
                staleness=self._staleness_counts.cumulative,
            )
            self._journal.write(record, due=last)

    def _lags(self) -> dict[str, float]:
        """Returns the number of pushes that each worker is behind the one with the most.

        It is empty where workers have several processes, or train locally.
        """
        servers, setup = self._worker.lifecycle.servers, self._worker.setup
        if servers is None or setup.outer is not None or setup.process_group is not None:
            return {}
        made: dict[int, int] = {}
        for line in servers.status()[0].workers:
            made[line.worker] = made.get(line.worker, 0) + line.applied + line.stale
        most = max(made.values(), default=0)
        return {f"updates/lag_worker_{i}": float(most - made[i]) for i in sorted(made)}

    def _learning_rates(self) -> dict[str, float]:
        groups = self._worker.setup.optimizer.param_groups
        if len(groups) == 1:
            return {"learning_rate": float(groups[0]["lr"])}
        return {f"learning_rate/group_{i}": float(group["lr"]) for i, group in enumerate(groups)}

    # -- records of the program -----------------------------------------------------------------

    def log(
        self, values: Mapping[str, float | torch.Tensor], run: str, step: int | None = None
    ) -> None:
        """Records numbers at a global step; None for the present one."""
        board = self.board
        if board is not None:
            board.scalars(self._worker.global_step if step is None else step, values, run)

    def evaluated(self, name: str, results: Mapping[str, float], step: int) -> None:
        self.log(results, name, step)
        shown = " ".join(f"{key} {value:.4f}" for key, value in results.items())
        self._progress.message(f"{name} at global step {step}: {shown}")

    @property
    def board(self) -> Board | None:
        """The TensorBoard writer, created on first access; None without a run directory."""
        if self._board is None and self._directory is not None:
            # Earlier curves, of a resumed run or another chief, are kept up to this step.
            step = self._worker.global_step if self._steps else self._first_step
            self._board = open_board(self._directory, step + 1 if step else 0)
            if self._board is None:
                self._directory = None
                self._progress.warn(
                    not_installed("TensorBoard, to which curves are written,", "dashboards")
                )
        return self._board

    # -- the end --------------------------------------------------------------------------------

    def training_ended(self) -> None:
        """Ends the measurement of training; saving and evaluation follow."""
        self._ended = time.monotonic()
        if self._last is not None:
            if self._shown < self._steps:
                self._show(self._last)
            self._report(self._last, last=True)
            self._last = None  # it holds tensors
        self._progress.training_ended()

    def finish(self) -> None:
        """Shows a summary of this worker, and as chief of the job, with the path of the curves."""
        if self._worker.task.draw is not None:  # no step was made
            return
        say = self._progress.message
        skipped = f", {self.skipped} skipped: the loss was not finite" if self.skipped else ""
        if self._worker.task.servers:
            stale = f", {self.stale} stale" if self.stale else ""
            applied = max(self.applied - self.skipped, 0)
            say(f"{self._steps} local steps: {applied} applied{stale}{skipped}")
            pushed, pulled = self._worker.backend.bytes_sent, self._worker.backend.bytes_received
            steps = max(self._steps, 1)
            say(
                f"bytes: {pushed:,} pushed, {pulled:,} pulled; "
                f"a step {pushed / steps:,.0f} and {pulled / steps:,.0f}"
            )
        elif self.skipped:
            say(f"{self._steps} steps{skipped}")
        if not self._worker.lifecycle.is_chief:
            return
        steps = self._worker.global_step - self._first_step
        begun = self._worker.checkpoints.restored_from
        if not steps and begun is not None and self._worker.lifecycle.interrupted is None:
            say(
                f"nothing was left to do: step {begun} is the last one; continue with "
                "more steps, or start again in another run directory"
            )
        if self._board is not None:
            say(f"curves: tensorboard --logdir {self._settings.home}/tensorboard")
        seconds = (self._ended or time.monotonic()) - self._began
        say(summary_line(steps, seconds, self.job_examples))

    def close(self) -> None:
        self._settle()
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._journal is not None:
            self._journal.close()
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None
        if self._exposition is not None:
            self._exposition.close()
