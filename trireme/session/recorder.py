"""What a run leaves behind and shows of itself: counts, curves, lines of progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trireme.metrics import Registry
from trireme.monitor.tensorboard import TensorBoard
from trireme.ps.messages import Applied, Verdict
from trireme.session.options import Options
from trireme.session.progress import Progress, ProgressRow, summary_line
from trireme.session.result import StepResult
from trireme.session.supervisor import Supervisor

__all__ = ["Recorder"]

_REPORT_SECONDS = 0.5


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
        data_seconds: spent waiting for batches since the last record.
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
        self.data_seconds = 0.0
        self._supervisor = supervisor
        self._progress = progress
        self._directory = None if run_dir is None else run_dir / "tensorboard"
        self._options = options
        self._updates_per_step = updates_per_step
        self._max_steps = max_steps
        self._board: TensorBoard | None = None
        self._steps = 0
        self._examples = 0
        self._first_step = supervisor.global_step
        self._began = time.perf_counter()
        self._ended: float | None = None
        self._marked = (self._began, 0)
        self._report_at = 0.0
        self._reported = (self._began, 0)
        self._compute_seconds = 0.0
        self._push_seconds = 0.0
        self._staleness = 0
        self._bytes = (0, 0)  # pushed and pulled up to the last record
        self.registry = Registry()
        self._count_applied = self.registry.counter(
            "trireme_pushes_total", "Pushes by verdict", verdict="applied"
        )
        self._count_stale = self.registry.counter(
            "trireme_pushes_total", "Pushes by verdict", verdict="stale"
        )
        self._count_pushed = self.registry.counter(
            "trireme_pushed_bytes_total", "Bytes of updates sent to the servers, as packed"
        )
        self._count_pulled = self.registry.counter(
            "trireme_pulled_bytes_total", "Bytes of values received from the servers"
        )
        self._count_examples = self.registry.counter(
            "trireme_examples_total", "Examples computed by this worker"
        )

    # -- each step ------------------------------------------------------------------------------

    def step(self, result: StepResult, compute_seconds: float, push_seconds: float) -> None:
        """Counts a step; shows and records it where that is due."""
        self._steps += 1
        self._examples += result.examples
        if result.verdict is not None:
            self.count(result.verdict, result.steps)
        self._count_examples.increment(result.examples)
        self._count_pushed.value = self._supervisor.bytes_pushed
        self._count_pulled.value = self._supervisor.bytes_pulled
        self._compute_seconds += compute_seconds
        self._push_seconds += push_seconds
        self._staleness += result.staleness
        row = ProgressRow(self._steps, result.global_step, self.job_examples, result)
        self._progress.step(row)
        if self._steps % self._options.log_every == 0:
            self._record(result)
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + _REPORT_SECONDS
            self._report(result)

    def count(self, verdict: Verdict, steps: int) -> None:
        """Counts a push, and the steps that it was of, by what became of it."""
        if isinstance(verdict, Applied):
            self.applied += steps
            self._count_applied.increment()
        else:
            self.stale += steps
            self._count_stale.increment()

    @property
    def job_examples(self) -> float:
        """How many examples have gone into the job since this worker joined.

        It is an estimate: the worker takes its own batches for those of all.
        """
        if not self._steps:
            return 0.0
        steps = self._supervisor.global_step - self._first_step
        return self._examples / self._steps * steps * self._updates_per_step

    def _record(self, result: StepResult) -> None:
        now = time.perf_counter()
        since, steps = self._marked
        made = max(self._steps - steps, 1)
        pace = result.examples * made / max(now - since, 1e-9)
        values = self._values(result)
        if self._supervisor.is_chief:
            self.log(
                {
                    **values,
                    **self._learning_rates(),
                    "speed/examples_per_second": pace,
                    "speed/data_seconds": self.data_seconds / made,
                    "speed/compute_seconds": self._compute_seconds / made,
                    "speed/push_seconds": self._push_seconds / made,
                    "updates/staleness": self._staleness / made,
                    "updates/applied_total": float(self.applied),
                    "updates/stale_total": float(self.stale),
                    **self._bytes_per_step(made),
                    **self._lags(),
                },
                "train",
            )
        self._supervisor.share_buffers()
        self._marked = (now, self._steps)
        self.data_seconds = self._compute_seconds = self._push_seconds = 0.0
        self._staleness = 0

    def _bytes_per_step(self, steps: int) -> dict[str, float]:
        """Returns what this worker's steps since the last record took on the wire."""
        if not self._supervisor.task.servers:
            return {}
        before, now = self._bytes, (self._supervisor.bytes_pushed, self._supervisor.bytes_pulled)
        self._bytes = now
        return {
            "bytes/pushed_per_step": (now[0] - before[0]) / steps,
            "bytes/pulled_per_step": (now[1] - before[1]) / steps,
        }

    def _values(self, result: StepResult) -> dict[str, float]:
        """Returns loss and metrics; means over the replicas, where those step together."""
        if not self._supervisor.together and not self._supervisor.is_chief:
            return {}
        own = {"loss": result.loss, **result.metrics} if self._counts else {}
        return self._supervisor.mean(own, counts=self._counts)

    def _report(self, result: StepResult) -> None:
        """Says how it goes, for whoever asks the coordinator."""
        now = time.perf_counter()
        since, examples = self._reported
        self._reported = (now, self._examples)
        self._supervisor.report(
            step=self._steps,
            global_step=result.global_step,
            max_steps=self._max_steps or 0,
            loss=result.loss,
            examples_per_second=(self._examples - examples) / max(now - since, 1e-9),
            applied=self.applied,
            stale=self.stale,
            bytes_pushed=self._supervisor.bytes_pushed,
            bytes_pulled=self._supervisor.bytes_pulled,
        )

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
        self._ended = time.perf_counter()
        self._progress.training_ended()

    def finish(self) -> None:
        """Shows what this worker did, and as chief how the job went and where to look at it."""
        say = self._progress.message
        if self._supervisor.task.servers:
            stale = f", {self.stale} stale" if self.stale else ""
            say(f"{self._steps} local steps: {self.applied} applied{stale}")
            pushed, pulled = self._supervisor.bytes_pushed, self._supervisor.bytes_pulled
            steps = max(self._steps, 1)
            say(
                f"bytes: {pushed:,} pushed, {pulled:,} pulled; "
                f"a step {pushed / steps:,.0f} and {pulled / steps:,.0f}"
            )
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
        seconds = (self._ended or time.perf_counter()) - self._began
        say(summary_line(steps, seconds, self.job_examples))

    def close(self) -> None:
        """Writes out what is left. May be repeated."""
        if self._board is not None:
            self._board.close()
            self._board = None
