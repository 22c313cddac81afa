"""What the tests of the supervision have in common."""

from __future__ import annotations

from dataclasses import replace

from trireme.launch.exit_reason import ExitReason, describe_status
from trireme.launch.supervision import Supervision
from trireme.launch.supervision_state import Notify, SupervisionLimits

LIMITS = SupervisionLimits(settle=2, give_up=1, stop=60, end=15, kill=10, echo=0.2)
SERVICES = ("ps:0",)


def supervise(
    workers: int = 2, limits: SupervisionLimits = LIMITS, services=SERVICES
) -> Supervision:
    supervision = Supervision(replace(limits, coordinated=bool(services)))
    for name in (*services, *(f"worker:{index}" for index in range(workers))):
        supervision.started(name)
    return supervision


def raised(
    at: float = 0.0, kind: str = "exception", summary: str = "ValueError: boom"
) -> ExitReason:
    return ExitReason(kind=kind, summary=summary, at=at)


def end(supervision: Supervision, now: float, name: str, status: int, reason=None):
    return supervision.exited(now, name, status, reason or describe_status(status))


def commands(actions):
    return [item for item in actions if not isinstance(item, Notify)]


def notices(actions) -> str:
    return "\n".join(item.text for item in actions if isinstance(item, Notify))
