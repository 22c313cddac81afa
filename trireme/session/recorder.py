"""What a run leaves behind and shows of itself: counts, curves, lines of progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from trireme.errors import NonFiniteError
from trireme.launch.detect import TaskConfig
from trireme.metrics import COUNT_BUCKETS, Histogram, Registry
from trireme.monitor.prometheus import expose
from trireme.monitor.records import Record, RecordWriter, begin_here, records_directory
from trireme.monitor.tensorboard import TensorBoard
from trireme.ps.messages import Applied, Verdict
from trireme.session.options import Options
from trireme.session.phases import ALONE, SERVED, Phases
from trireme.session.progress import Progress, ProgressRow, summary_line
from trireme.session.result import StepResult
from trireme.session.supervisor import Supervisor

__all__ = ["Recorder"]

MOST_SKIPS = 100
"""After so many steps in a row whose loss is not finite a run is ended: values do not get better by
themselves."""

_FEW = 10
_AGAINST_NAN = (
    "Lower the learning rate, clip the gradient (clip_norm=1.0), look for bad examples, or go on "
    "from an earlier checkpoint (resume=PATH)"
)

_REPORT_SECONDS = 0.5
_SHOW_SECONDS = 0.1

_GAUGES = {
    "global_step": "The global step of the values",
    "loss": "The loss of the newest batch",
    "examples_per_second": "Examples that this worker computes each second",
    "memory_bytes": "Resident memory of the process",
}
"""What a worker reports, by name, that is a gauge too."""


class _Mark(NamedTuple):
    """The sums at a time, from which means over what came after are made."""

    time: float
    steps: int
    examples: int
    staleness: int
    pushed: int
    pulled: int
    seconds: dict[str, float]

    def pace(self, before: _Mark) -> float:
        """Returns the examples per second since an earlier mark."""
        return (self.examples - before.examples) / max(self.time - before.time, 1e-9)


class Recorder:
    """Counts one worker's steps, shows them, and as chief writes the curves.

    Args:
        supervisor: whose job it is.
        progress: where lines go.
        run_dir: where curves go; None for nowhere.
        options: the session's.
        updates_per_step: how many workers' updates make one global step.
        max_steps: the global step at which training ends, where that is known.
        counts: whether the loss and the metrics are this process's to tell.

    Attributes:
        applied, stale: this worker's steps by the verdict of the push that they went into.
        skipped: its steps that made no update, because their loss was not finite.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        progress: Progress,
        run_dir: Path | None,
        options: Options,
        updates_per_step: int,
        max_steps: int | None,
        *,
        counts: bool = True,
    ) -> None:
        self._counts = counts
        self.applied = 0
        self.stale = 0
        self.skipped = 0
        self._in_a_row = 0  # of these
        self._supervisor = supervisor
        self._progress = progress
        self._directory = None if run_dir is None else run_dir / "tensorboard"
        self._options = options
        self._updates_per_step = updates_per_step
        self._max_steps = max_steps
        self._board: TensorBoard | None = None
        self._steps = 0
        self._last: StepResult | None = None
        self._examples = 0
        self._first_step = supervisor.global_step
        self._began = time.monotonic()
        self._ended: float | None = None
        self._report_at = 0.0
        self.registry = Registry()
        self._alone = not supervisor.task.servers and supervisor.task.processes == 1
        self.phases = Phases(ALONE if self._alone else SERVED, self.registry)
        self._recorded = _Mark(self._began, 0, 0, 0, 0, 0, dict(self.phases.totals))
        self._reported = self._recorded
        self._staleness = 0
        self._stalenesses: list[int] = []  # those that the histogram has not seen yet
        self._pushes_applied = self._pushes_stale = 0
        self._show_at = 0.0
        self._shown = 0  # the last step that was shown
        self._staleness_histogram = self.registry.histogram(
            "trireme_push_staleness", "Updates between a pull and its push", COUNT_BUCKETS
        )
        self._process = psutil.Process()
        self._gauges = {
            name: self.registry.gauge(f"trireme_{name}", text) for name, text in _GAUGES.items()
        }
        task = supervisor.task
        self._journal = _journal(task, run_dir)
        self._exposition = expose(self.registry, task.name, task.metrics_host, task.scrape_port)
        if self._exposition is not None:
            progress.message(f"metrics: {self._exposition.address}")
        self._count_applied = self.registry.counter(
            "trireme_pushes_total", "Pushes by verdict", verdict="applied"
        )
        self._count_stale = self.registry.counter(
            "trireme_pushes_total", "Pushes by verdict", verdict="stale"
        )
        self._count_pushed = self.registry.counter(
            "trireme_bytes_pushed_total", "Bytes of updates sent to the servers, as packed"
        )
        self._count_pulled = self.registry.counter(
            "trireme_bytes_pulled_total", "Bytes of values received from the servers"
        )
        self._count_examples = self.registry.counter(
            "trireme_examples_total", "Examples computed by this worker"
        )
        self._count_saved = self.registry.counter(
            "trireme_checkpoints_total", "Checkpoints by what became of them", outcome="saved"
        )
        self._count_unsaved = self.registry.counter(
            "trireme_checkpoints_total", "Checkpoints by what became of them", outcome="failed"
        )

    # -- each step ------------------------------------------------------------------------------

    def fetched(self, began: float, ended: float) -> None:
        """Counts a wait for a batch, between two readings of `time.monotonic`."""
        self.phases.add(("data", began, ended))

    def step(self, result: StepResult, began: float, computed: float) -> None:
        """Counts a step; shows and records it where that is due.

        Args:
            result: what it came to.
            began: when it began, on `time.monotonic`.
            computed: when its gradient was there.
        """
        self._steps += 1
        self._last = result
        self._examples += result.examples
        if result.verdict is not None:
            self.count(result.verdict, result.steps)
        if result.examples:
            self._in_a_row = 0
        elif self._options.nan == "skip":
            self._skip(result)
        self._staleness += result.staleness
        self._stalenesses.append(result.staleness)
        self._add_phases(began, computed)
        now, due = time.monotonic(), self._steps % self._options.log_every == 0
        if due or now >= self._show_at:
            self._show_at = now + _SHOW_SECONDS
            self._show(result)
        if due:
            self._record(result)
        if now >= self._report_at:
            self._report_at = now + _REPORT_SECONDS
            self._report(result)

    def _skip(self, result: StepResult) -> None:
        """Counts a step whose update was left out.

        Raises:
            NonFiniteError: so were all before it for long: such a run learns nothing any more.
        """
        self.skipped += 1
        self._in_a_row += 1
        if self.skipped == 1:
            self._progress.warn(
                f"the loss of local step {self._steps} is {result.loss}: its update is left out "
                '(nan="skip"); how many there are is said at the end'
            )
        if self._in_a_row >= MOST_SKIPS:
            raise NonFiniteError(
                f"{self._in_a_row} steps in a row had a loss that is not finite, and made no "
                f"update: nothing is learned any more. {_AGAINST_NAN}"
            )

    def check_progress(self) -> None:
        """Checks, at the end, that the run has made a step at all.

        Raises:
            NonFiniteError: each one was left out. Of several workers one may have had bad examples
                only: then only of many steps is that an error.
        """
        fewest = 1 if self._supervisor.task.workers == 1 else _FEW
        if self.skipped == self._steps >= fewest:
            raise NonFiniteError(
                f"none of the {self._steps} steps made an update: each had a loss that is not "
                f"finite, and was left out. {_AGAINST_NAN}"
            )

    def _show(self, result: StepResult) -> None:
        self._settle()
        self._shown = self._steps
        self._progress.step(ProgressRow(self._steps, result.global_step, self.job_examples, result))

    def _add_phases(self, began: float, computed: float) -> None:
        add, exchange = self.phases.add, self._supervisor.exchange
        add(("compute", began, computed))
        if self._alone:
            add(("apply", exchange.push_began, exchange.push_ended))
        else:
            add(("push", exchange.push_began, exchange.push_ended))
            add(("wait", exchange.wait_began, exchange.wait_ended))
        if exchange.wait_began > exchange.push_ended:  # the next batch was made meanwhile
            add(("data", exchange.push_ended, exchange.wait_began))

    def count(self, verdict: Verdict, steps: int) -> None:
        """Counts a push, and the steps that it was of, by what became of it."""
        if isinstance(verdict, Applied):
            self.applied += steps
            self._pushes_applied += 1
        else:
            self.stale += steps
            self._pushes_stale += 1

    def _settle(self) -> None:
        """Brings what was counted to where others read it; step by step that would cost more."""
        self.phases.settle()
        stalenesses = self._stalenesses[:]
        self._stalenesses.clear()
        self._staleness_histogram.observe_all(stalenesses)
        self._count_examples.value = self._examples
        self._count_applied.value = self._pushes_applied
        self._count_stale.value = self._pushes_stale
        self._count_saved.value = self._supervisor.storage.saved
        self._count_unsaved.value = self._supervisor.storage.failed

    @property
    def job_examples(self) -> float:
        """How many examples have gone into the job since this worker joined.

        It is an estimate: the worker takes its own batches for those of all.
        """
        if not self._steps:
            return 0.0
        steps = self._supervisor.global_step - self._first_step
        return self._examples / self._steps * steps * self._updates_per_step

    def _mark(self) -> _Mark:
        pushed, pulled = self._supervisor.bytes_pushed, self._supervisor.bytes_pulled
        sums = (self._steps, self._examples, self._staleness, pushed, pulled)
        return _Mark(time.monotonic(), *sums, dict(self.phases.totals))

    def _record(self, result: StepResult) -> None:
        before, now = self._recorded, self._mark()
        self._recorded = now
        made = max(now.steps - before.steps, 1)
        seconds = self.phases.since(before.seconds, made)
        values = self._values(result)
        if self._supervisor.is_chief and self._directory is not None:
            self.log(
                {
                    **values,
                    **self._learning_rates(),
                    "speed/examples_per_second": now.pace(before),
                    **{f"speed/{name}": value for name, value in seconds.items()},
                    "updates/staleness": (now.staleness - before.staleness) / made,
                    "updates/applied_total": float(self.applied),
                    "updates/stale_total": float(self.stale),
                    **self._bytes_per_step(before, now),
                    **self._lags(),
                },
                "train",
            )
        self._supervisor.buffers.share()

    def _bytes_per_step(self, before: _Mark, now: _Mark) -> dict[str, float]:
        """Returns what this worker's steps between two marks took on the wire."""
        if not self._supervisor.task.servers:
            return {}
        steps = max(now.steps - before.steps, 1)
        return {
            "bytes/pushed_per_step": (now.pushed - before.pushed) / steps,
            "bytes/pulled_per_step": (now.pulled - before.pulled) / steps,
        }

    def _values(self, result: StepResult) -> dict[str, float]:
        """Returns loss and metrics; means over the replicas, where those step together."""
        if not self._supervisor.together and not self._supervisor.is_chief:
            return {}
        own = {"loss": result.loss, **result.metrics} if self._counts else {}
        return self._supervisor.mean(own, counts=self._counts)

    def _report(self, result: StepResult, *, last: bool = False) -> None:
        """Says how it goes, for whoever asks the coordinator, and for the records."""
        self._settle()
        before, now = self._reported, self._mark()
        self._reported = now
        made = now.steps - before.steps
        status: dict[str, float | str] = {
            "step": self._steps,
            "global_step": result.global_step,
            "max_steps": self._max_steps or 0,
            "loss": result.loss,
            "examples_per_second": now.pace(before),
            "applied": self.applied,
            "skipped": self.skipped,
            "stale": self.stale,
            "staleness": (now.staleness - before.staleness) / max(made, 1),
            "memory_bytes": self._process.memory_info().rss,
        }
        if self._supervisor.storage.failed:
            status["checkpoints_failed"] = self._supervisor.storage.failed
        if self._exposition is not None:
            status["metrics"] = self._exposition.address
        for name, gauge in self._gauges.items():
            gauge.value = float(status[name])
        status["bytes_pushed"], status["bytes_pulled"] = now.pushed, now.pulled
        self._count_pushed.value, self._count_pulled.value = now.pushed, now.pulled
        status |= self.phases.since(before.seconds, made)
        self._supervisor.report(status)
        if self._journal is not None:
            record = Record(
                time=time.time(),
                status={"state": self._supervisor.state, **status},
                seconds=now.seconds,
                staleness=_upper_bounds(self._staleness_histogram),
            )
            self._journal.write(record, due=last)

    def _lags(self) -> dict[str, float]:
        """Returns how far behind each worker is; nothing without servers."""
        if not self._supervisor.task.servers:
            return {}
        lags = self._supervisor.lags()
        return {f"updates/lag_worker_{worker}": float(lag) for worker, lag in lags.items()}

    def _learning_rates(self) -> dict[str, float]:
        groups = self._supervisor.optimizer.param_groups
        if len(groups) == 1:
            return {"learning_rate": float(groups[0]["lr"])}
        return {f"learning_rate/group_{i}": float(group["lr"]) for i, group in enumerate(groups)}

    # -- what the program asks for --------------------------------------------------------------

    def log(self, values: Mapping[str, float | torch.Tensor], run: str) -> None:
        """Records numbers at the present global step."""
        board = self.board
        if board is not None:
            board.scalars(self._supervisor.global_step, values, run)

    def record(self, kind: str, name: str, value: Any, options: dict[str, Any]) -> None:
        """Records something else than numbers, by the name of `TensorBoard`'s method."""
        board = self.board
        if board is not None:
            getattr(board, kind)(name, value, self._supervisor.global_step, **options)

    def graph(self, model: nn.Module, example: Any, options: dict[str, Any]) -> None:
        """Records the model's graph."""
        board = self.board
        if board is not None:
            board.graph(model, example, **options)

    def evaluated(self, name: str, results: Mapping[str, float]) -> None:
        """Records and shows the results of an evaluation."""
        self.log(results, name)
        shown = " ".join(f"{key} {value:.4f}" for key, value in results.items())
        self._progress.message(f"{name} at global step {self._supervisor.global_step}: {shown}")

    def say(self, text: str) -> None:
        """Shows a line."""
        self._progress.message(text)

    def checkpoint(self, path: Path) -> None:
        """Shows that a checkpoint was written."""
        self._progress.message(f"saved {path}")

    @property
    def board(self) -> TensorBoard | None:
        """Where records go, made when it is first asked for; None for nowhere."""
        if self._board is None and self._directory is not None:
            # Curves of before are kept up to here: a resumed run's, or another chief's.
            step = self._supervisor.global_step if self._steps else self._first_step
            self._board = TensorBoard(self._directory, step + 1 if step else 0)
        return self._board

    # -- the end --------------------------------------------------------------------------------

    def training_ended(self) -> None:
        """Stops the watch: what comes now is saving and evaluating."""
        self._ended = time.monotonic()
        if self._last is not None:
            if self._shown < self._steps:
                self._show(self._last)
            self._report(self._last, last=True)
            self._last = None  # it holds what was computed
        self._progress.training_ended()

    def finish(self) -> None:
        """Shows what this worker did, and as chief how the job went and where to look at it."""
        say = self._progress.message
        if self._supervisor.task.servers:
            stale = f", {self.stale} stale" if self.stale else ""
            applied = max(self.applied - self.skipped, 0)
            say(f"{self._steps} local steps: {applied} applied{stale}{self._left_out}")
            pushed, pulled = self._supervisor.bytes_pushed, self._supervisor.bytes_pulled
            steps = max(self._steps, 1)
            say(
                f"bytes: {pushed:,} pushed, {pulled:,} pulled; "
                f"a step {pushed / steps:,.0f} and {pulled / steps:,.0f}"
            )
        elif self.skipped:
            say(f"{self._steps} steps{self._left_out}")
        if not self._supervisor.is_chief:
            return
        steps = self._supervisor.global_step - self._first_step
        begun, interrupted = self._supervisor.restored_from, self._supervisor.interrupted
        if not steps and begun is not None and interrupted is None:
            say(
                f"nothing was left to do: step {begun} is the last one; train on with "
                "more steps, or begin anew in another run directory"
            )
        if self._board is not None:
            say(f"curves: tensorboard --logdir {self._directory}")
        seconds = (self._ended or time.monotonic()) - self._began
        say(summary_line(steps, seconds, self.job_examples))

    @property
    def _left_out(self) -> str:
        return f", {self.skipped} skipped: the loss was not finite" if self.skipped else ""

    def close(self) -> None:
        """Writes out what is left. May be repeated."""
        self._settle()
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._journal is not None:
            self._journal.close()
        if self._exposition is not None:
            self._exposition.close()


def _journal(task: TaskConfig, run_dir: Path | None) -> RecordWriter | None:
    """Returns where this worker's records go; None for nowhere."""
    if task.records is None and run_dir is None:
        return None
    directory = (
        Path(task.records) if task.records is not None else records_directory(Path(run_dir or "."))
    )
    return RecordWriter(directory, begin_here(task.name, task.job, run_dir))


def _upper_bounds(histogram: Histogram) -> dict[str, float]:
    """Returns how many values were at most so large, by that bound as text."""
    samples = histogram.samples().items()
    return {label[4:-1]: count for (suffix, label), count in samples if suffix == "_bucket"}
