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
    TaskClaimedError,
    TriremeError,
    UnsupportedOptimizerError,
    UsageError,
    WaitTimeout,
    WireError,
    WireTimeout,
)

if TYPE_CHECKING:
    from trireme.session.distribute import distribute
    from trireme.session.evaluation import accuracy
    from trireme.session.options import Checkpoint
    from trireme.session.profile import Profile
    from trireme.session.session import Session, StepResult
    from trireme.strategies import SSP, Async, Sync

__version__ = "0.1.0.dev0"

__all__ = [
    "SSP",
    "AddressInUse",
    "Async",
    "AuthenticationError",
    "Checkpoint",
    "CheckpointError",
    "ClusterError",
    "ConfigurationError",
    "ConnectTimeout",
    "ConnectionBroken",
    "ConnectionClosed",
    "ConnectionRefused",
    "DataError",
    "Fenced",
    "FrameError",
    "JobFailed",
    "ModelMismatchError",
    "NonFiniteError",
    "PeerClosed",
    "Profile",
    "Rejected",
    "RolledBack",
    "ServerError",
    "Session",
    "StepResult",
    "Sync",
    "TaskClaimedError",
    "TriremeError",
    "UnsupportedOptimizerError",
    "UsageError",
    "WaitTimeout",
    "WireError",
    "WireTimeout",
    "accuracy",
    "distribute",
]

_HOME = {
    "Async": "trireme.strategies",
    "Checkpoint": "trireme.session.options",
    "Profile": "trireme.session.profile",
    "SSP": "trireme.strategies",
    "Session": "trireme.session.session",
    "StepResult": "trireme.session.session",
    "Sync": "trireme.strategies",
    "accuracy": "trireme.session.evaluation",
    "distribute": "trireme.session.distribute",
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
