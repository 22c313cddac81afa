"""The methods of a session that record summaries for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trireme.monitor.board import Board, Write
from trireme.session.job_view import JobView
from trireme.session.operation_log import OperationLog

if TYPE_CHECKING:
    pass


class SummaryMethods(JobView):
    """Records numbers, images and the like at the present global step.

    Only the chief records; on other workers, and without a run directory, the methods do nothing.
    """

    @property
    def model(self) -> nn.Module:
        """The whole model, as the job knows it."""
        return self.worker.setup.model

    @property
    def board(self) -> Board | None:
        """The TensorBoard writer; None where this worker is not chief or has no run directory."""
        return self.recorder.board if self.is_chief else None

    @property
    def pipeline(self) -> OperationLog | None:
        """What runs this process's stages or operations; None without a pipeline or a graph."""
        return None

    def log(
        self,
        values: Mapping[str, float | torch.Tensor] | None = None,
        *,
        run: str = "train",
        step: int | None = None,
        **named: float | torch.Tensor,
    ) -> None:
        """Records numbers.

        Args:
            values: the numbers by name.
            run: the TensorBoard run that they belong to.
            step: the global step that they belong to, such as `evaluated_step`; None for the
                present one.
            named: further numbers, as keywords.
        """
        if (board := self.board) is not None:
            step = self.global_step if step is None else step
            board.scalars(step, {**(values or {}), **named}, run)

    def image(self, name: str, image: Any, **options: Any) -> None:
        """Records an image, or a grid of them.

        Args:
            name: the tag under which TensorBoard shows it.
            image: a tensor or array (channels, height, width), or four-dimensional for several;
                floats in [0, 1] or bytes. `dataformats` says other orders, such as "HW".
            options: the run, as `run=`, and those of `SummaryWriter.add_image` or `add_images`.
        """
        self._record("add_images" if image.ndim == 4 else "add_image", name, image, options)

    def histogram(self, name: str, values: Any, **options: Any) -> None:
        """Records how the values of a tensor are distributed (`SummaryWriter.add_histogram`)."""
        self._record("add_histogram", name, values, options)

    def audio(self, name: str, sound: Any, **options: Any) -> None:
        """Records a sound: values in [-1, 1] of shape (1, time) (`SummaryWriter.add_audio`)."""
        self._record("add_audio", name, sound, options)

    def text(self, name: str, text: str, **options: Any) -> None:
        """Records a text in Markdown (`SummaryWriter.add_text`)."""
        self._record("add_text", name, text, options)

    def pr_curve(
        self, name: str, predictions: torch.Tensor, *, labels: torch.Tensor, **options: Any
    ) -> None:
        """Records precision and recall by threshold (`SummaryWriter.add_pr_curve`).

        Args:
            name: the tag under which TensorBoard shows it.
            predictions: for each example, how likely it is to be of the class, in [0, 1].
            labels: for each example, whether it is.
            options: the run, as `run=`, and those of `SummaryWriter.add_pr_curve`.
        """
        self._record("add_pr_curve", name, (labels, predictions), options)

    def embedding(self, name: str, matrix: Any, *, run: str = "train", **options: Any) -> None:
        """Records points (number, dimension) for the projector (`SummaryWriter.add_embedding`).

        The options are `metadata`, a label for each point, and `label_img`, an image for each.
        """
        options |= {"tag": name, "global_step": self.global_step}
        self._write_now(name, lambda writer: writer.add_embedding(matrix, **options), run)

    def figure(self, name: str, figure: Any, *, run: str = "train", **options: Any) -> None:
        """Records one or several figures of matplotlib (`SummaryWriter.add_figure`)."""
        step = self.global_step
        self._write_now(name, lambda to: to.add_figure(name, figure, step, **options), run)

    def graph(self, example: Any, *, run: str = "train") -> None:
        """Records what the model computes from example inputs, with shapes and devices.

        The model computes once, in evaluation mode and without gradients. Under the strategy
        `graph`, after the first step, its modules are on the devices where they are placed.

        Args:
            example: a tensor, a tuple of arguments, or a dict of keyword arguments.
            run: the name of the run.
        """
        placed = None if self.pipeline is None else self.pipeline.graph
        devices = placed.decision.modules if placed is not None else None
        if (board := self.board) is not None:
            board.graph(self.model, example, devices, run)

    def _write_now(self, name: str, write: Write, run: str) -> None:
        if (board := self.board) is not None:
            board.write_now(name, write, run)

    def _record(self, method: str, name: str, values: Any, options: dict[str, Any]) -> None:
        if (board := self.board) is not None:
            board.record(method, name, values, self.global_step, **options)
