"""What a worker trains: the model with its optimizer, and how its updates become steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from trireme.ps.dense import FlatModel
from trireme.ps.messages import OptimizerSpec
from trireme.ps.rule import Rule
from trireme.session.options import Options

if TYPE_CHECKING:
    from trireme.parallel.gang import Gang
    from trireme.parallel.part import ModelPart

__all__ = ["Training"]


@dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        model: its trained parameters lie in `flat`.
        optimizer: the user's.
        flat: the flat buffers.
        rule: by which updates become steps.
        options: the session's.
        run_dir: where checkpoints and records go; None for nowhere.
        prefetch: whether a push is waited for only after the next gradient is there.
        gang: the processes that hold the model with this one; None for one process.
        part: what this process holds of it; None where that is all.
        outer: the servers' optimizer over deltas, where workers train by themselves; None where
            servers apply gradients by the user's.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    flat: FlatModel
    rule: Rule
    options: Options
    run_dir: Path | None
    prefetch: bool = False
    gang: Gang | None = None
    part: ModelPart | None = None
    outer: OptimizerSpec | None = None
