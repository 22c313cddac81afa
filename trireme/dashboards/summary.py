"""What a program records for TensorBoard beside numbers, as TensorFlow's `tf.summary` did."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trireme.dashboards.board import TensorBoard

if TYPE_CHECKING:
    from trireme.session.job_methods import JobMethods


class Summary:
    """Records images, histograms and the like at the present global step; as `session.summary`.

    The keyword `run` names the TensorBoard run, by default "train". Other keywords are those of the
    method of `SummaryWriter`. Without a board, as on workers that are not chief, the methods do
    nothing.
    """

    def __init__(self, job: JobMethods, board: TensorBoard | None) -> None:
        self._job, self._board = job, board

    def image(self, name: str, image: Any, **options: Any) -> None:
        """Records an image (channels, height, width), or a four-dimensional grid of images.

        They are tensors or arrays, of floats in [0, 1] or bytes. `dataformats` says other orders,
        such as "HW".
        """
        self._record("images" if image.ndim == 4 else "image", name, image, **options)

    def histogram(self, name: str, values: Any, **options: Any) -> None:
        """Records how the values of a tensor are distributed."""
        self._record("histogram", name, values, **options)

    def audio(self, name: str, sound: Any, **options: Any) -> None:
        """Records a sound: values in [-1, 1] of shape (1, time)."""
        self._record("audio", name, sound, **options)

    def text(self, name: str, text: str, **options: Any) -> None:
        """Records a text in Markdown."""
        self._record("text", name, text, **options)

    def pr_curve(
        self, name: str, predictions: torch.Tensor, *, labels: torch.Tensor, **options: Any
    ) -> None:
        """Records precision and recall by threshold.

        `predictions` says of each example how likely it is to be of the class, in [0, 1]; `labels`,
        whether it is.
        """
        self._record("pr_curve", name, (labels, predictions), **options)

    def embedding(self, name: str, matrix: Any, **options: Any) -> None:
        """Records points (number, dimension) for the projector.

        The options are `metadata`, a label for each point, and `label_img`, an image for each.
        """
        run, step = options.pop("run", "train"), self._job.global_step
        named = {"tag": name, "global_step": step, **options}
        self._write_now(name, lambda writer: writer.add_embedding(matrix, **named), run)

    def figure(self, name: str, figure: Any, *, run: str = "train", **options: Any) -> None:
        """Records one or several figures of matplotlib."""
        step = self._job.global_step
        self._write_now(name, lambda to: to.add_figure(name, figure, step, **options), run)

    def graph(self, example: Any, *, run: str = "train") -> None:
        """Records what the model computes from example inputs, with shapes and devices.

        The model computes once, in evaluation mode and without gradients. Under the strategy
        `graph`, after the first step, its modules are on the devices where they are placed.

        Args:
            example: a tensor, a tuple of arguments, or a dict of keyword arguments.
            run: the name of the run.
        """
        if self._board is None:
            return
        placed = None if self._job.pipeline is None else self._job.pipeline.graph
        devices = None if placed is None else placed.decision.modules
        self._board.graph(self._job.model, example, devices, run)

    def _record(
        self, kind: str, name: str, value: Any, *, run: str = "train", **options: Any
    ) -> None:
        if self._board is not None:
            self._board.record(f"add_{kind}", name, value, self._job.global_step, run, **options)

    def _write_now(self, name: str, write: Callable[[Any], object], run: str) -> None:
        if self._board is not None:
            self._board.write_now(name, write, run)
