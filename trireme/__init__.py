"""Trains a program written for one device on many processes; parallelism is configured at launch.

The module exports the public names. Each is imported when it is first accessed, so that
`import trireme` alone does not load PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trireme import errors
from trireme.errors import *  # noqa: F403  # errors.__all__ lists them

if TYPE_CHECKING:
    from trireme.parallel.config import PipelineConfig
    from trireme.ps.messages import Applied, Stale
    from trireme.session.distribute import distribute
    from trireme.session.hooks import EarlyStopping, Hook
    from trireme.session.observers.pipeline_trace import PipelineTrace
    from trireme.session.observers.profile import Profile
    from trireme.session.observers.summaries import Summaries
    from trireme.session.options import Checkpoint
    from trireme.session.replica.replica import model_loss
    from trireme.session.result import accuracy
    from trireme.session.session import Session, StepResult
    from trireme.strategies import (
        FSDP,
        SSP,
        AllReduce,
        Async,
        Averaging,
        DiLoCo,
        PipelineParallel,
        Sync,
        TensorParallel,
    )

__version__ = "0.1.0.dev0"

__all__ = [
    "FSDP",
    "SSP",
    "AllReduce",
    "Applied",
    "Async",
    "Averaging",
    "Checkpoint",
    "DiLoCo",
    "EarlyStopping",
    "Hook",
    "PipelineConfig",
    "PipelineParallel",
    "PipelineTrace",
    "Profile",
    "Session",
    "Stale",
    "StepResult",
    "Summaries",
    "Sync",
    "TensorParallel",
    "accuracy",
    "distribute",
    "model_loss",
]
__all__ += errors.__all__

_HOME = {
    "trireme.parallel.config": ("PipelineConfig",),
    "trireme.ps.messages": ("Applied", "Stale"),
    "trireme.session.distribute": ("distribute",),
    "trireme.session.hooks": ("EarlyStopping", "Hook"),
    "trireme.session.observers.pipeline_trace": ("PipelineTrace",),
    "trireme.session.observers.profile": ("Profile",),
    "trireme.session.observers.summaries": ("Summaries",),
    "trireme.session.options": ("Checkpoint",),
    "trireme.session.replica.replica": ("model_loss",),
    "trireme.session.result": ("accuracy",),
    "trireme.session.session": ("Session", "StepResult"),
    "trireme.strategies": (
        *("FSDP", "SSP", "AllReduce", "Async", "Averaging", "DiLoCo"),
        *("PipelineParallel", "Sync", "TensorParallel"),
    ),
}
"""The names that are imported when they are first accessed, by the module that defines them."""

_RENAMED = {
    "Pipeline": "PipelineParallel",
    "PipelinePicture": "PipelineTrace",
    "Tensor": "TensorParallel",
}
"""Former public names and their replacements."""

_SUBPACKAGES = frozenset({"data", "models", "ps"})
"""The subpackages that `trireme.NAME` imports when they are first accessed."""


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"trireme.{name}")
    if name in _RENAMED:
        raise AttributeError(f"trireme.{name} has been renamed: use trireme.{_RENAMED[name]}")
    home = next((module for module, names in _HOME.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'trireme' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
