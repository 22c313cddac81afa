"""Copies of one shard at a point of the sequence of decisions, which is the same on every shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from trireme.ps.messages import Refused, Waiting
from trireme.ps.shard.answers import Wait
from trireme.ps.shard.instructions import Reply
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.state import ShardState
from trireme.ps.snapshot_messages import Snapshot, TakeSnapshot


class _Request(NamedTuple):
    owner: Participant
    route: object
    request: TakeSnapshot
    since: float


class Copies:
    """Holds the requests for copies until the leader has decided where to make them."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._held: dict[int, _Request] = {}  # by worker, which has one request at a time
        self._made: dict[int, int] = {}  # by worker: the token of its last copy

    @property
    def tokens(self) -> Mapping[int, int]:
        """The tokens of the copies that are not made, by worker."""
        return {worker: held.request.token for worker, held in self._held.items()}

    def ask(
        self, now: float, route: object, who: Participant, request: TakeSnapshot
    ) -> Refused | None:
        """Holds a request, in place of an earlier one of its worker; returns why not, if so.

        A copy that was made already, whose answer the worker did not get, is not made again: here
        it would be of a later point than on other shards.
        """
        view = self._state.participants.view.number
        if not self._state.loaded:
            return Refused("rejected", "no values are loaded", view)
        if self._made.get(who.worker) == request.token:
            return Refused("busy", "the copy was made already", view)
        self._held[who.worker] = _Request(who, route, request, now)
        return None

    def drop_absent(self) -> list[Reply]:
        """Drops the requests of workers that are out of the job; returns the answers."""
        participants = self._state.participants
        gone = [held for held in self._held.values() if not participants.holds(held.owner)]
        for held in gone:
            del self._held[held.owner.worker]
        refused = Refused("fenced", "the view has changed", participants.view.number)
        return [Reply(held.route, refused) for held in gone]

    def take_routes(self) -> list[object]:
        """Drops all requests; returns their routes."""
        held, self._held = self._held, {}
        return [each.route for each in held.values()]

    def make(self, worker: int, token: int) -> list[Reply]:
        """Makes a copy, if it was asked for here; returns the answer."""
        self._made[worker] = token
        held = self._held.get(worker)
        if held is None or held.request.token != token:
            return []
        del self._held[worker]
        state, request, leader = self._state, held.request, self._state.leader
        assert state.values is not None
        view, since = state.participants.view.number, -1
        tensors = state.values.copy(state=request.state)
        if state.tables is not None and request.state:
            if request.since_view == view and state.tables.changes_after <= request.since:
                since = request.since
            tensors += state.tables.copy(None if since < 0 else since, shown=state.shows_rows)
        snapshot = Snapshot(
            state.step,
            tuple(spec for spec, _ in tensors),
            state.table.export(),
            () if leader is None else leader.examples.consumed(),
            {} if leader is None else leader.examples.sizes(),
            {} if leader is None else leader.examples.orders(),
            view,
            since,
        )
        return [Reply(held.route, snapshot, [tensor for _, tensor in tensors])]

    def waiting(self, now: float) -> Iterator[tuple[object, Wait]]:
        """Yields the requests that are held: their routes, with the workers and the reasons."""
        participants, leader = self._state.participants, self._state.leader
        for worker, held in self._held.items():
            names: tuple[str, ...] = (participants.view.primary_name(0),)
            if leader is not None:
                names = leader.missing_copy(worker, held.request.token, participants.view)
            notice = Waiting("a copy of every shard", names, now - held.since)
            yield held.route, Wait(worker, notice)
