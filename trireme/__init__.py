"""One training program, written for one device; at launch, how it is spread.

The public names, nothing else. Each is imported when it is first asked for, so that
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
    from trireme.session.distribute import distribute
    from trireme.session.evaluation import accuracy
    from trireme.session.hooks import EarlyStopping, Hook
    from trireme.session.model_loss import model_loss
    from trireme.session.options import Checkpoint
    from trireme.session.pipeline_picture import PipelinePicture
    from trireme.session.profile import Profile
    from trireme.session.session import Session, StepResult
    from trireme.session.summaries import Summaries
    from trireme.strategies import (
        FSDP,
        SSP,
        AllReduce,
        Async,
        Averaging,
        DiLoCo,
        Pipeline,
        Sync,
        Tensor,
    )

__version__ = "0.1.0.dev0"

__all__ = [
    "FSDP",
    "SSP",
    "AddressInUse",
    "AllReduce",
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
    "Pipeline",
    "PipelineConfig",
    "PipelinePicture",
    "Profile",
    "Rejected",
    "RolledBack",
    "ServerError",
    "Session",
    "StaleEpochError",
    "StepResult",
    "Summaries",
    "Sync",
    "TaskClaimedError",
    "Tensor",
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
    "Async": "trireme.strategies",
    "Averaging": "trireme.strategies",
    "Checkpoint": "trireme.session.options",
    "DiLoCo": "trireme.strategies",
    "EarlyStopping": "trireme.session.hooks",
    "FSDP": "trireme.strategies",
    "Hook": "trireme.session.hooks",
    "Pipeline": "trireme.strategies",
    "PipelineConfig": "trireme.parallel.config",
    "PipelinePicture": "trireme.session.pipeline_picture",
    "Profile": "trireme.session.profile",
    "SSP": "trireme.strategies",
    "Session": "trireme.session.session",
    "StepResult": "trireme.session.session",
    "Summaries": "trireme.session.summaries",
    "Sync": "trireme.strategies",
    "Tensor": "trireme.strategies",
    "accuracy": "trireme.session.evaluation",
    "distribute": "trireme.session.distribute",
    "model_loss": "trireme.session.model_loss",
}
"""Where the names live that are imported when they are asked for."""

_SUBPACKAGES = frozenset({"data", "models", "ps"})
"""What `trireme.NAME` reaches without an import of its own."""


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"trireme.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'trireme' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
