"""The leader, which decides for all shards. Without I/O.

It is on the server with the primary of shard 0, and part of that shard's replicated state: a copy
that becomes the primary goes on with the same sequence. Each other shard reports what it holds
(`Held`), and the leader writes one numbered sequence of decisions, which all shards follow in order
(`Decided`): whose pushes make the next step, which workers train, where a copy is made, where
training ends, and where the shards stop to be divided anew.

A worker may die when its push has reached some shards and not others, and an update cannot be taken
back from an optimizer with momentum. So the leader decides to apply a push only when every shard
has reported that it holds it, and snapshots likewise: nothing waits for one that not all are
asked for. Where shard 0 is the only one, nobody is asked and nothing is sent.

This is the two-phase commit of databases, with the leader as its coordinator. Source: Bernstein,
Hadzilacos, Goodman, Concurrency Control and Recovery in Database Systems (1987), section 7.4.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

import msgspec
import torch

from trireme.cluster.view import View
from trireme.ps.leader.decisions import (
    Add,
    Apply,
    Cut,
    Decided,
    Decision,
    Divide,
    Held,
    Measure,
    Members,
    PushId,
    Stop,
)
from trireme.ps.leader.ending import Ending
from trireme.ps.leader.example_ledgers import ExampleLedgers, ExamplesState
from trireme.ps.rule import Rule

Live = Mapping[int, int]  # the incarnations of workers that train; never changed in place

Square = Callable[[Sequence[PushId]], float]
"""Returns the squared L2 norm of shard 0's part of the mean gradient of pushes."""


class _Shard(msgspec.Struct):
    known: int = 0  # how many decisions it has received
    sent: int = 0  # how many decisions were sent to it
    view: int = -1  # the number of the view that was last sent to it
    # the newest push of each worker that it holds: (incarnation, sequence)
    pushes: dict[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    # the tokens of the snapshots that it was asked for, by worker
    snapshots: dict[int, int] = msgspec.field(default_factory=dict)
    additions: Collection[tuple[int, int]] = ()  # the requests to add parameters that it holds
    # as in its last `Held` that had them
    measured: tuple[PushId, ...] = ()
    square: float = 0.0


class LeaderState(msgspec.Struct, frozen=True, array_like=True):
    """What a leader keeps for all shards, without what is under way."""

    last: int | None  # the job's last step; None for none
    under_way: tuple[int, ...]  # the workers that compute an update
    examples: ExamplesState
    topics: dict[str, dict[int, bytes]]  # what workers share


class Leader:
    """Decides for all shards, and keeps what one shard must keep for all."""

    def __init__(self) -> None:
        self.ending = Ending()  # when training ends, and which workers may begin another update
        self.examples = ExampleLedgers()  # the ledgers of the data sets
        # the bytes that workers share: under each topic the last of each worker
        self.topics: dict[str, dict[int, torch.Tensor]] = {}
        self.loaded = False  # whether values are loaded: before that nothing is applied
        self._rule = Rule()
        self._others: dict[int, _Shard] = {}
        self._waiting: dict[PushId, int] = {}  # with the steps of each: some shard may not hold it
        self._ready: dict[PushId, int] = {}  # every shard holds it
        self._proposed: tuple[PushId, ...] = ()
        self._members: Live | None = None  # the last `Members`
        self._stopped = False
        self._chief: int | None = None
        self._divides = 0  # the number of the view for which `Divide` is to be written
        self._log: deque[Decision] = deque()  # the decisions that some shard may not know
        self._first = 0  # the number of the first of them

    @property
    def alone(self) -> bool:
        return not self._others

    # -- events ----------------------------------------------------------------------------------

    def begin(self, rule: Rule, shards: int, step: int) -> None:
        """Takes the rule of the model that was shown, and the number of its shards."""
        self._rule = rule
        self._count(shards)
        self.ending.go_by(rule)
        self.examples.interleave = rule.synchronous and rule.aggregate == 0
        if rule.max_steps is not None:
            self.ending.set_last(step, rule.max_steps)

    def export(self) -> LeaderState:
        topics = {
            topic: {worker: data.numpy().tobytes() for worker, data in left.items()}
            for topic, left in self.topics.items()
        }
        under_way = tuple(sorted(self.ending.under_way))
        return LeaderState(self.ending.last, under_way, self.examples.export(), topics)

    def resume(self, state: LeaderState) -> None:
        self.loaded = True
        self.ending.last, self.ending.under_way = state.last, set(state.under_way)
        self.examples.resume(state.examples)
        self.topics = {
            topic: {
                worker: torch.frombuffer(bytearray(data), dtype=torch.uint8)
                for worker, data in left.items()
            }
            for topic, left in state.topics.items()
        }

    def view(self, view: View, live: Live) -> None:
        """Takes a view, which may announce that the shards are divided anew."""
        self._divides = view.number if view.next_shards else 0
        self._chief = view.chief
        self._count(len(view.shards))
        self.examples.members(tuple(live))

    def _count(self, shards: int) -> None:
        for shard in range(1, shards):
            self._others.setdefault(shard, _Shard())

    def hold(self, push: PushId, steps: int) -> None:
        (self._waiting if self._lacking(push) else self._ready)[push] = steps

    def drop(self, push: PushId) -> None:
        self._waiting.pop(push, None)
        self._ready.pop(push, None)

    def hear(self, shard: int, message: Held) -> None:
        """Takes what another shard holds. A late, repeated or stray message changes nothing."""
        other = self._others.get(shard)
        if other is None:
            return
        other.known = max(other.known, min(message.known, self._first + len(self._log)))
        other.snapshots, other.additions = dict(message.snapshots), message.additions
        if message.measured:
            other.measured, other.square = message.measured, message.square
        for push in message.pushes:
            worker, *newest = push
            other.pushes[worker] = max(other.pushes.get(worker, (0, 0)), (newest[0], newest[1]))
            if push in self._waiting and not self._lacking(push):
                self._ready[push] = self._waiting.pop(push)

    # -- deciding --------------------------------------------------------------------------------

    def decide(
        self,
        step: int,
        live: Live,
        snapshots: Mapping[int, int],
        square: Square,
        additions: Collection[tuple[int, int]] = (),
    ) -> Decision | None:
        """Writes the next decision and returns it; None where nothing can be decided now.

        Shard 0 has carried out all decisions before.

        Args:
            snapshots: the tokens of the snapshots that shard 0 is asked for, by worker.
            additions: the requests to add parameters that shard 0 holds: (worker, token).
        """
        decision = self._next(step, live, snapshots, square, additions)
        return None if decision is None else self.write(decision)

    def write(self, decision: Decision) -> Decision:
        """Appends a decision to the sequence; returns it."""
        if self._others:
            self._log.append(decision)
        return decision

    def _next(
        self,
        step: int,
        live: Live,
        snapshots: Mapping[int, int],
        square: Square,
        additions: Collection[tuple[int, int]],
    ) -> Decision | None:
        if self._divides:
            view, self._divides = self._divides, 0
            return Divide(step, view)
        if not self.loaded:
            return None
        if live is not self._members:
            self._members = live
            return Members(step, tuple(sorted(live.items())))
        if not self._stopped and self.ending.reached(step):
            self._stopped = True
            self._waiting.clear()
            self._ready.clear()
            return Stop(step)
        for worker, token in snapshots.items():
            if all([other.snapshots.get(worker) == token for other in self._others.values()]):
                return Cut(step, worker, token)
        for worker, token in additions:
            # In rounds all workers add the same before the same step: the chief's values count.
            early = self._rule.synchronous and self._chief in live and worker != self._chief
            held = all([(worker, token) in other.additions for other in self._others.values()])
            if held and not early:
                return Add(step, worker, token)
        if not self._ready:
            return None
        return self._round(step, live, square) if self._rule.synchronous else self._single(step)

    def _single(self, step: int) -> Apply:
        push = next(iter(self._ready))
        return Apply(step + self._ready.pop(push), (push,))

    def _round(self, step: int, live: Live, square: Square) -> Apply | Measure | None:
        """Returns the round of the pushes that every shard has held first, if they suffice."""
        needed = needed_for(self._rule, live)
        if not 0 < needed <= len(self._ready):  # mostly: one update of several has come
            return None
        ready = [push for push in self._ready if live.get(push[0]) == push[1]]
        if len(ready) < needed:
            return None
        members, scale = tuple(sorted(ready[:needed])), 1.0
        if self._rule.clip_norm is not None:
            if len(self._proposed) >= needed and {*ready} >= {*self._proposed}:
                members = self._proposed  # their norms are known already, or on their way
            squares = [other.square for other in self._others.values() if other.measured == members]
            if len(squares) < len(self._others):
                if self._proposed == members:
                    return None
                self._proposed = members
                return Measure(step, members)
            scale = clip_factor(square(members) + sum(squares), self._rule.clip_norm)
        steps = max([self._ready[push] for push in members])
        self._waiting.clear()
        self._ready.clear()
        self._proposed = ()
        return Apply(step + steps, members, scale)

    def tell(self, view: int) -> list[tuple[int, Decided]]:
        end = self._first + len(self._log)
        out = []
        for shard, other in self._others.items():
            # A shard that has held nothing need not know the view.
            if other.sent < end or (other.pushes and other.view < view):
                other.sent, other.view = end, view
                decisions = tuple(islice(self._log, other.known - self._first, None))
                out.append((shard, Decided(other.known, decisions, view)))
        if out:
            known = min(other.known for other in self._others.values())
            while self._first < known:  # every shard knows these decisions
                self._log.popleft()
                self._first += 1
        return out

    # -- what is waited for ----------------------------------------------------------------------

    def missing(self, pushes: Collection[PushId], view: View) -> tuple[str, ...]:
        """Returns the tasks with shards that do not hold all of these pushes."""
        shards = {shard for push in pushes for shard in self._lacking(push)}
        return tuple(map(view.primary_name, sorted(shards)))

    def missing_snapshot(self, worker: int, token: int, view: View) -> tuple[str, ...]:
        """Returns the tasks with shards that were not asked for a copy that shard 0 was."""
        shards = (s for s, other in self._others.items() if other.snapshots.get(worker) != token)
        return tuple(map(view.primary_name, shards))

    def _lacking(self, push: PushId) -> list[int]:
        worker, newest = push[0], push[1:]
        return [s for s, other in self._others.items() if other.pushes.get(worker) != newest]


def needed_for(rule: Rule, live: Collection[int]) -> int:
    """Returns how many pushes make a step."""
    if not rule.synchronous:
        return 1
    return min(rule.aggregate, len(live)) if rule.aggregate else len(live)


def clip_factor(square: float, limit: float) -> float:
    """Returns the factor by which `torch.nn.utils.clip_grad_norm_` multiplies a gradient."""
    norm = math.sqrt(square) if square >= 0 else math.nan
    return min(1.0, limit / (norm + 1e-6)) if math.isfinite(norm) else math.nan
