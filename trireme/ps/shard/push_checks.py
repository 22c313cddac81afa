"""What a push must be so that a shard can decide it."""

from __future__ import annotations

from trireme.ps.layout import Layout
from trireme.ps.messages import Push
from trireme.ps.optimizers import misfit
from trireme.ps.shard.state import ShardState

__all__ = ["senseless"]


def senseless(state: ShardState, worker: int, push: Push) -> str | None:
    """Returns why a push of a worker makes no sense; None when it does."""
    last, period = state.table.records[worker].sequence, state.ending.period
    if not state.loaded or state.shown is None:
        return "a push came before the values were loaded"
    if push.sequence > last + 1:
        return (
            f"push {push.sequence} of worker:{worker} came after push {last}: the ones between are "
            "missing"
        )
    if not 0 <= push.weight < float("inf"):
        return f"a push weighs {push.weight}: it must be finite and 0 or more"
    if not 1 <= push.steps <= period:
        return f"a push is of {push.steps} steps, and may be of 1 to {period}"
    if state.synchronous and push.pulled > state.step:
        return (
            f"a push for step {push.pulled}, and ps:{state.server} is at {state.step}: pull the "
            "values of one step from all servers"
        )
    if push.absent and (reason := _nowhere(state.shown.layout, push.absent)) is not None:
        return reason
    if push.examples and (reason := state.examples.senseless(push.examples)) is not None:
        return reason
    return misfit(state.shown.optimizer, push.hyper) if push.hyper is not None else None


def _nowhere(layout: Layout, absent: tuple[int, ...]) -> str | None:
    """Returns why these are no positions of parameters; None when they are."""
    count = len(layout.spec.parameters)
    if absent[0] < 0 or absent[-1] >= count or list(absent) != sorted(set(absent)):
        return f"a push names absent parameters that are not, ascending, among the {count}"
    return None
