"""Snapshots of one shard at one point of the sequence of decisions, the same on every shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trireme.ps.leader.example_ledgers import ExampleLedgers
from trireme.ps.messages import Refused
from trireme.ps.shard.answers import Asked, Wait, wait
from trireme.ps.shard.instructions import Reply
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.state import ShardState
from trireme.ps.snapshot_messages import Snapshot, TakeSnapshot


class Snapshots:
    """Holds the requests for snapshots until the leader has decided where to make them."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._held: dict[int, Asked] = {}  # by worker, which has one request at a time
        self._made: dict[int, int] = {}  # by worker: the token of its last copy

    @property
    def tokens(self) -> Mapping[int, int]:
        """The tokens of the snapshots that are not made, by worker."""
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
        self._held[who.worker] = Asked(who, route, now, request)
        return None

    def take_routes(self, *, absent: bool = False) -> list[object]:
        """Drops all requests, or those of workers that are out of the job; returns the routes."""
        holds = self._state.participants.holds
        gone = [held for held in self._held.values() if not (absent and holds(held.owner))]
        for held in gone:
            del self._held[held.owner.worker]
        return [held.route for held in gone]

    def make(self, worker: int, token: int) -> list[Reply]:
        """Makes a copy, if it was asked for here; returns the answer."""
        self._made[worker] = token
        held = self._held.get(worker)
        if held is None or held.request.token != token:
            return []
        del self._held[worker]
        state, request = self._state, held.request
        assert state.values is not None and state.shown is not None
        layout = state.shown.layout.spec
        tensors = state.values.copy(state=request.state)
        if (extra := state.extension) is not None and request.state and state.shows_extra:
            tensors += extra.copy()
        examples = ExampleLedgers() if state.leader is None else state.leader.examples
        message = Snapshot(
            state.step,
            tuple(spec for spec, _ in tensors),
            state.table.export(),
            examples.consumed(),
            examples.sizes(),
            examples.orders(),
            layout if layout.parameters[-1].addition else None,
            state.written_at == state.step,
        )
        return [Reply(held.route, message, [tensor for _, tensor in tensors])]

    def waits(self, now: float) -> Iterator[Wait]:
        view, leader = self._state.participants.view, self._state.leader
        for worker, held in self._held.items():
            names: tuple[str, ...] = (view.primary_name(0),)
            if leader is not None:
                names = leader.missing_snapshot(worker, held.request.token, view)
            yield wait(now, held, "a copy of every shard", names)
