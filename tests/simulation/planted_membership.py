"""Memberships, and members, with one bug each, which the simulator must find."""

from __future__ import annotations

from typing import Any

import msgspec

from trireme.cluster.member_protocol import MemberProtocol
from trireme.cluster.membership import Closed, Event, Received, Tick, step
from trireme.cluster.messages import Join, Joined, ViewChanged
from trireme.cluster.state import Decision, Send, State
from trireme.cluster.view import LastChief, View


def tells_newcomers_nothing(now: float, state: State, *events: Event) -> Decision:
    """Who connects again does not hear of the view that was made while it was away."""
    decision = step(now, state, *events)
    if not any(isinstance(each, Received) and isinstance(each.message, Join) for each in events):
        return decision
    if state.view is None or decision.state.view is not state.view:
        return decision
    kept = [
        order
        for order in decision.instructions
        if not (isinstance(order, Send) and isinstance(order.message, ViewChanged))
    ]
    return decision._replace(instructions=tuple(kept))


def admits_the_lost_as_they_were(now: float, state: State, *events: Event) -> Decision:
    """A process that was lost comes back under the incarnation under which it was given up."""
    said = list(events)
    for place, event in enumerate(said):
        if not isinstance(event, Received) or not isinstance(event.message, Join):
            continue
        name = f"{event.message.role}:{event.message.index}"
        task = state.tasks[name]
        if task.state == "lost":
            before = msgspec.structs.replace(task, incarnation=task.incarnation - 1)
            join = msgspec.structs.replace(event.message, incarnation=0)
            state = msgspec.structs.replace(state, tasks={**state.tasks, name: before})
            said[place] = Received(event.connection, join)
    return step(now, state, *said)


def numbers_views_alike(now: float, state: State, *events: Event) -> Decision:
    """A view without a worker that was lost has the number of the one with it."""
    decision = step(now, state, *events)
    before, view = state.view, decision.state.view
    if before is None or view is None or len(view.workers) >= len(before.workers):
        return decision
    alike = msgspec.structs.replace(view, number=before.number)
    orders = tuple(
        Send(order.connection, ViewChanged(alike))
        if isinstance(order, Send) and isinstance(order.message, ViewChanged)
        else order
        for order in decision.instructions
    )
    return Decision(msgspec.structs.replace(decision.state, view=alike), orders, decision.reason)


def never_loses_anybody(now: float, state: State, *events: Event) -> Decision:
    """A worker that is silent, or whose connection closed, is waited for."""
    if state.phase == "running" and any(isinstance(each, Tick | Closed) for each in events):
        for task in state.tasks.values():
            if task.role == "worker" and task.active:
                waited = msgspec.structs.replace(task, heard=now, since=now)
                state = msgspec.structs.replace(state, tasks={**state.tasks, task.name: waited})
    return step(now, state, *events)


class KeepsItsIncarnation(MemberProtocol):
    """A process that was given up and admitted again believes that it is what it was."""

    def _take_joined(self, now: float, message: Joined) -> None:
        known = self.incarnation or message.incarnation
        super()._take_joined(now, msgspec.structs.replace(message, incarnation=known))


class TakesNoLaterView(MemberProtocol):
    """A process stays with the first view that it hears of."""

    def heard(self, now: float, message: Any) -> Any:
        if isinstance(message, ViewChanged) and self.view is not None:
            return None
        return super().heard(now, message)


class LeavesBeforeTheChief(LastChief):
    """A worker that has made its last update leaves, and the chief may be lost before it saves."""

    def awaits(self, view: View | None, step: int) -> bool:
        return False


class NeverTakesOver(LastChief):
    """A worker leaves when the chief is lost."""

    def awaits(self, view: View | None, step: int) -> bool:
        return super().awaits(view, step) and view is not None and view.chief != self._worker

    def follow(self, view: View | None, step: int) -> bool:
        return False
