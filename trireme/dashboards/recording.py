"""The curves of a worker's job, and what its program shows beside them: written by the chief."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.dashboards.board import Scalar, TensorBoard
from trireme.dashboards.summary import Summary
from trireme.session.result import StepResult
from trireme.session.worker.observer import Observer
from trireme.session.worker.recorder import Means, Recorder


class Curves(Observer):
    """Writes the chief's curves; the board is made when something is first written."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        run_dir = worker.setup.settings.run_dir
        self._directory = None if run_dir is None else run_dir / "tensorboard"
        self._board: TensorBoard | None = None
        self._means: Means | None = None
        self._steps = False  # whether this worker has made one
        self._flushed: int | None = None  # the checkpoint before which curves are in the files

    @property
    def board(self) -> TensorBoard | None:
        """The TensorBoard writer, created on first access; None without a run directory."""
        if self._board is None and self._directory is not None:
            # Earlier curves, of a resumed run or another chief, are kept up to this step.
            step = self.worker.global_step if self._steps else self.worker.first_step
            self._board = TensorBoard(self._directory, step + 1 if step else 0)
        return self._board

    def after_step(self, recorder: Recorder, result: StepResult, *, due: bool) -> None:
        self._steps = True
        if self._means is None:
            self._means = Means(recorder.began)
        if due:
            means, values = self._means.of(recorder.sums()), recorder.values(result)
            if self.worker.lifecycle.is_chief and self._directory is not None:
                values |= self._learning_rates()
                values |= {f"speed/{phase}_seconds": means[phase] for phase in recorder.seconds}
                values |= {
                    "speed/examples_per_second": means["examples_per_second"],
                    "updates/staleness": means["staleness"],
                    "updates/applied_total": float(recorder.applied),
                    "updates/stale_total": float(recorder.stale),
                }
                if self.worker.task.servers:
                    values |= {
                        "bytes/pushed_per_step": means["bytes_pushed"],
                        "bytes/pulled_per_step": means["bytes_pulled"],
                    }
                self.log(values, "train", self.worker.global_step)
        if (saved := self.worker.storage.submitted) != self._flushed:
            self._flushed = saved
            if self._board is not None:  # a run that is resumed there has the curves before it
                self._board.flush(timeout=0.0)

    def _learning_rates(self) -> dict[str, float]:
        groups = self.worker.setup.optimizer.param_groups
        if len(groups) == 1:
            return {"learning_rate": float(groups[0]["lr"])}
        return {f"learning_rate/group_{i}": float(group["lr"]) for i, group in enumerate(groups)}

    def log(self, values: Mapping[str, Scalar], run: str, step: int) -> None:
        if (board := self.board) is not None:
            board.scalars(step, values, run)

    def summary(self, job: Any) -> Summary:
        """Returns what records at the present step of a session, or of an optimizer."""
        return Summary(job, job.board)

    def finish(self) -> None:
        if self._board is not None:
            home = self.worker.setup.settings.home
            self.worker.progress.message(f"curves: tensorboard --logdir {home}/tensorboard")

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None
