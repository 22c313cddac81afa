"""The interface of boards, on which the chief shows curves and summaries, and which exist."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trireme.plugins import Plugins

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter

Write: TypeAlias = "Callable[[SummaryWriter], object]"
"""Writes something for TensorBoard."""


class Board(ABC):
    """Shows what the chief records. A failure to write is logged, and does not end training.

    The argument `run` of methods is the name of the run, such as `train` or `validation`.
    """

    @abstractmethod
    def scalars(
        self, step: int, values: Mapping[str, float | torch.Tensor], run: str = "train"
    ) -> None:
        """Logs numbers or tensors of one element by name; `/` in a name makes groups."""

    @abstractmethod
    def record(
        self, method: str, name: str, values: Any, step: int, run: str = "train", **options: Any
    ) -> None:
        """Logs a copy of values by a method of `SummaryWriter`.

        Args:
            method: the method, such as `add_image`.
            name: the tag under which they are shown.
            values: the method's values: one, or a tuple of several.
            step: the global step.
            run: the name of the run.
            options: the method's options.
        """

    @abstractmethod
    def write_now(self, name: str, write: Write, run: str = "train") -> None:
        """Calls a function with the writer of a run, before this call returns; see `submit`."""

    @abstractmethod
    def submit(self, name: str, write: Write, run: str = "train") -> bool:
        """Calls a function on the board's thread, with the writer of a run.

        Args:
            name: the name of what it writes, for a warning if it fails.
            write: the function; no other code may change the values that it uses.
            run: the name of the run.

        Returns:
            Whether the function will be called, unless writing fails before.
        """

    @abstractmethod
    def graph(
        self, model: nn.Module, example: Any, devices: Mapping[str, str] | None, run: str = "train"
    ) -> None:
        """Records what a model computes from example inputs, with shapes and devices.

        Args:
            model: the model, which computes once, in evaluation mode and without gradients.
            example: a tensor, a tuple of arguments, or a dict of keyword arguments.
            devices: the devices of its modules, where they are known.
            run: the name of the run.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether logged values still reach the files."""

    @abstractmethod
    def flush(self, timeout: float = 30.0) -> bool:
        """Waits until all logged values are in the files; returns whether it was in time."""

    @abstractmethod
    def close(self, timeout: float = 60.0) -> None:
        """Writes remaining values and closes the files. Closing twice does nothing."""


@dataclass(frozen=True, slots=True)
class BoardType:
    """A kind of board.

    Attributes:
        open: the function from a directory, and the first global step that may be logged there, to
            the board, as `package.module:function`.
    """

    open: str


BOARDS = Plugins("trireme.boards", "board", BoardType)
"""Every installed kind of board."""


def open_board(directory: Path, first_step: int) -> Board | None:
    """Returns the board of a run; None where no plug-in that has one is installed.

    Raises:
        ConfigurationError: it is installed and does not work here.
    """
    kind = BOARDS.find("tensorboard")
    if kind is None:
        return None
    board: Board = pkgutil.resolve_name(kind.open)(directory, first_step)
    return board
