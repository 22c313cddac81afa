"""Trains a program written for one device on many processes; parallelism is configured at launch.

The module exports the public names. Each is imported when it is first accessed, so that
`import trireme` alone does not load PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trireme.errors import (
    AddressInUse,
    AuthenticationError,
    CheckpointError,
    CheckpointLockLost,
    ClusterError,
    ConfigurationError,
    ConnectionBroken,
    ConnectionClosed,
    ConnectionRefused,
    ConnectTimeout,
    DataError,
    Fenced,
    FrameError,
    JobFailed,
    ModelMismatchError,
    NonFiniteError,
    PeerClosed,
    Rejected,
    RolledBack,
    ServerError,
    StaleEpochError,
    TaskClaimedError,
    TriremeError,
    UnsupportedOptimizerError,
    UsageError,
    WaitTimeout,
    WireError,
    WireTimeout,
)

if TYPE_CHECKING:
    from trireme.parallel.config import PipelineConfig
    from trireme.ps.messages import Applied, Stale
    from trireme.session.distribute import distribute
    from trireme.session.hooks import EarlyStopping, Hook
    from trireme.session.observers.pipeline_trace import PipelineTrace
    from trireme.session.observers.profile import Profile
    from trireme.session.observers.summaries import Summaries
    from trireme.session.options import Checkpoint
    from trireme.session.replica.evaluation import accuracy
    from trireme.session.replica.model_loss import model_loss
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
    "AddressInUse",
    "AllReduce",
    "Applied",
    "Async",
    "AuthenticationError",
    "Averaging",
    "Checkpoint",
    "CheckpointError",
    "CheckpointLockLost",
    "ClusterError",
    "ConfigurationError",
    "ConnectTimeout",
    "ConnectionBroken",
    "ConnectionClosed",
    "ConnectionRefused",
    "DataError",
    "DiLoCo",
    "EarlyStopping",
    "Fenced",
    "FrameError",
    "Hook",
    "JobFailed",
    "ModelMismatchError",
    "NonFiniteError",
    "PeerClosed",
    "PipelineConfig",
    "PipelineParallel",
    "PipelineTrace",
    "Profile",
    "Rejected",
    "RolledBack",
    "ServerError",
    "Session",
    "Stale",
    "StaleEpochError",
    "StepResult",
    "Summaries",
    "Sync",
    "TaskClaimedError",
    "TensorParallel",
    "TriremeError",
    "UnsupportedOptimizerError",
    "UsageError",
    "WaitTimeout",
    "WireError",
    "WireTimeout",
    "accuracy",
    "distribute",
    "model_loss",
]

_HOME = {
    "AllReduce": "trireme.strategies",
    "Applied": "trireme.ps.messages",
    "Async": "trireme.strategies",
    "Averaging": "trireme.strategies",
    "Checkpoint": "trireme.session.options",
    "DiLoCo": "trireme.strategies",
    "EarlyStopping": "trireme.session.hooks",
    "FSDP": "trireme.strategies",
    "Hook": "trireme.session.hooks",
    "PipelineConfig": "trireme.parallel.config",
    "PipelineParallel": "trireme.strategies",
    "PipelineTrace": "trireme.session.observers.pipeline_trace",
    "Profile": "trireme.session.observers.profile",
    "SSP": "trireme.strategies",
    "Session": "trireme.session.session",
    "Stale": "trireme.ps.messages",
    "StepResult": "trireme.session.session",
    "Summaries": "trireme.session.observers.summaries",
    "Sync": "trireme.strategies",
    "TensorParallel": "trireme.strategies",
    "accuracy": "trireme.session.replica.evaluation",
    "distribute": "trireme.session.distribute",
    "model_loss": "trireme.session.replica.model_loss",
}
"""The module that defines each name that is imported when it is first accessed."""

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
    home = _HOME.get(name)
    if name in _RENAMED:
        raise AttributeError(f"trireme.{name} has been renamed: use trireme.{_RENAMED[name]}")
    if home is None:
        raise AttributeError(f"module 'trireme' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
