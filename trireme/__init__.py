"""Trains a program written for one device on many processes; parallelism is configured at launch.

The module exports the public names. Each is imported when it is first accessed, so that
`import trireme` alone does not load PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trireme import errors
from trireme.errors import *  # noqa: F403  # errors.__all__ lists them
from trireme.version import __version__ as __version__

if TYPE_CHECKING:
    from trireme.averaging.strategies import Averaging as Averaging
    from trireme.averaging.strategies import DiLoCo as DiLoCo
    from trireme.dashboards.summaries import Summaries as Summaries
    from trireme.graph.capture.scopes import device as device
    from trireme.graph.config import GraphConfig as GraphConfig
    from trireme.graph.strategy import Graph as Graph
    from trireme.jobs.job import JobStatus as JobStatus
    from trireme.jobs.job import LaunchedJob as LaunchedJob
    from trireme.jobs.run import run as run
    from trireme.launch.environment import program_arguments as program_arguments
    from trireme.loops.distribute import distribute as distribute
    from trireme.parallel.config import PipelineConfig as PipelineConfig
    from trireme.parallel.strategies import FSDP as FSDP
    from trireme.parallel.strategies import AllReduce as AllReduce
    from trireme.parallel.strategies import PipelineParallel as PipelineParallel
    from trireme.parallel.strategies import TensorParallel as TensorParallel
    from trireme.ps.messages import Applied as Applied
    from trireme.ps.messages import Stale as Stale
    from trireme.session.hooks import Hook as Hook
    from trireme.session.loss import model_loss as model_loss
    from trireme.session.options import Checkpoint as Checkpoint
    from trireme.session.result import StepResult as StepResult
    from trireme.session.result import accuracy as accuracy
    from trireme.session.session import Session as Session
    from trireme.strategies import SSP as SSP
    from trireme.strategies import Async as Async
    from trireme.strategies import Sync as Sync
    from trireme.tables.embedding import Embedding as Embedding
    from trireme.tables.embedding import EmbeddingBag as EmbeddingBag
    from trireme.tracking.early_stopping import EarlyStopping as EarlyStopping
    from trireme.tracking.profile import Profile as Profile
    from trireme.verification.command import verify as verify

_HOME = {
    "trireme.graph.capture.scopes": ("device",),
    "trireme.jobs.job": ("JobStatus", "LaunchedJob"),
    "trireme.jobs.run": ("run",),
    "trireme.launch.environment": ("program_arguments",),
    "trireme.graph.config": ("GraphConfig",),
    "trireme.graph.strategy": ("Graph",),
    "trireme.parallel.config": ("PipelineConfig",),
    "trireme.parallel.strategies": ("FSDP", "AllReduce", "PipelineParallel", "TensorParallel"),
    "trireme.ps.messages": ("Applied", "Stale"),
    "trireme.loops.distribute": ("distribute",),
    "trireme.session.hooks": ("Hook",),
    "trireme.tracking.early_stopping": ("EarlyStopping",),
    "trireme.tracking.profile": ("Profile",),
    "trireme.dashboards.summaries": ("Summaries",),
    "trireme.verification.command": ("verify",),
    "trireme.session.options": ("Checkpoint",),
    "trireme.session.loss": ("model_loss",),
    "trireme.session.result": ("StepResult", "accuracy"),
    "trireme.session.session": ("Session",),
    "trireme.tables.embedding": ("Embedding", "EmbeddingBag"),
    "trireme.averaging.strategies": ("Averaging", "DiLoCo"),
    "trireme.strategies": ("SSP", "Async", "Sync"),
}
"""The names that are imported when they are first accessed, by the module that defines them."""

__all__ = [name for names in _HOME.values() for name in names]
__all__ += errors.__all__

_SUBPACKAGES = frozenset({"data", "models", "ps"})  # imported at the first access


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"trireme.{name}")
    home = next((module for module, names in _HOME.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'trireme' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        package = home.split(".")[1]
        if error.name not in (home, f"trireme.{package}"):  # else it is a plug-in's
            raise
        from trireme.plugins import not_installed

        extra = "notebook" if package == "jobs" else package
        message = not_installed(f"trireme.{name}", extra)
        raise errors.ConfigurationError(message) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
