"""What a worker trains: the model with its optimizer, the options, and the rule of updates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from trireme.ps.flat import FlatModel
from trireme.ps.messages import OptimizerSpec
from trireme.ps.rule import Rule
from trireme.session.options import Options

if TYPE_CHECKING:
    from trireme.parallel.model_part import ModelPart
    from trireme.parallel.process_group import ProcessGroup

__all__ = ["TrainingSetup"]


@dataclass(frozen=True)
class TrainingSetup:
    """The model, its optimizer and the settings of a worker's training.

    Attributes:
        model: the model, whose trained parameters lie in `flat`.
        optimizer: the user's optimizer.
        flat: the flat buffers.
        rule: the rule by which updates become steps.
        options: the session's options.
        run_dir: the directory of checkpoints and records; None for none.
        prefetch: whether the next gradient is computed before the answer to a push is received.
        process_group: the processes that hold the model together; None for one process.
        part: this process's part of the model; None where it holds the whole model.
        outer: the servers' optimizer over deltas, where workers train locally; None where servers
            apply gradients by the user's optimizer.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    flat: FlatModel
    rule: Rule
    options: Options
    run_dir: Path | None
    prefetch: bool = False
    process_group: ProcessGroup | None = None
    part: ModelPart | None = None
    outer: OptimizerSpec | None = None
