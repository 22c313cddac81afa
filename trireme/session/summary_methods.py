"""The methods of a session that record summaries for TensorBoard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trireme.monitor.tensorboard.board import TensorBoard

__all__ = ["SummaryMethods"]


class SummaryMethods(ABC):
    """Records numbers, images and the like at the present global step.

    Only the chief records; on other workers, and without a run directory, the methods do nothing.

    Attributes:
        model: the session's model.
    """

    model: nn.Module

    @property
    @abstractmethod
    def board(self) -> TensorBoard | None:
        """The TensorBoard writer; None where nothing is recorded."""

    @property
    @abstractmethod
    def global_step(self) -> int:
        """The global step of the values that this worker has."""

    def log(
        self,
        values: Mapping[str, float | torch.Tensor] | None = None,
        *,
        run: str = "train",
        **named: float | torch.Tensor,
    ) -> None:
        """Records numbers.

        Args:
            values: the numbers by name.
            run: the TensorBoard run that they belong to.
            named: further numbers, as keywords.
        """
        if (board := self.board) is not None:
            board.scalars(self.global_step, {**(values or {}), **named}, run)

    def image(self, name: str, image: Any, **options: Any) -> None:
        """Records an image (channels, height, width), or several; see `TensorBoard.image`."""
        if (board := self.board) is not None:
            board.image(name, image, self.global_step, **options)

    def histogram(self, name: str, values: Any, **options: Any) -> None:
        """Records how the values of a tensor are distributed."""
        if (board := self.board) is not None:
            board.histogram(name, values, self.global_step, **options)

    def audio(self, name: str, sound: Any, **options: Any) -> None:
        """Records a sound: values in [-1, 1] of shape (1, time)."""
        if (board := self.board) is not None:
            board.audio(name, sound, self.global_step, **options)

    def text(self, name: str, text: str, **options: Any) -> None:
        """Records a text in Markdown."""
        if (board := self.board) is not None:
            board.text(name, text, self.global_step, **options)

    def embedding(self, name: str, matrix: Any, **options: Any) -> None:
        """Records points (number, dimension) for the projector."""
        if (board := self.board) is not None:
            board.embedding(name, matrix, self.global_step, **options)

    def pr_curve(
        self, name: str, predictions: torch.Tensor, *, labels: torch.Tensor, **options: Any
    ) -> None:
        """Records precision and recall by threshold; see `TensorBoard.pr_curve`."""
        if (board := self.board) is not None:
            board.pr_curve(name, predictions, self.global_step, labels=labels, **options)

    def figure(self, name: str, figure: Any, **options: Any) -> None:
        """Records a matplotlib figure."""
        if (board := self.board) is not None:
            board.figure(name, figure, self.global_step, **options)

    def graph(self, example: Any, **options: Any) -> None:
        """Records the model's graph, traced with an example of its inputs."""
        if (board := self.board) is not None:
            board.graph(self.model, example, **options)
