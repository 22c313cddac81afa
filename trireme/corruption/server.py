"""What a server checks: pushes as they come, its memory between updates, and copies of shards.

At each check every copy of a shard takes digests right after the update that makes the step, and
the backups send theirs to the primary, which judges when it has all. Nobody waits for that.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from trireme.corruption.checks import Checks
from trireme.corruption.digests import Seal, digest
from trireme.corruption.judge import Verdict, judge
from trireme.corruption.naming import by_parameter
from trireme.errors import CorruptedValues, FrameError, WireError
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import Push
from trireme.ps.replication.log import ReplicationLog
from trireme.ps.server.handler import ShardHandler
from trireme.ps.server.service import ServerPart
from trireme.ps.shard.values.parameters import Values
from trireme.ps.shard.watch import Watch
from trireme.wire.connection import Incoming
from trireme.wire.message import Message, Number
from trireme.wire.service import Link

_log = logging.getLogger(__name__)

_MOST_STEPS = 8
"""Of so many checks digests are kept that lack those of others."""

_MOST_REFUSALS = 3
"""So often a gradient may come other than it was sent before its memory counts as bad."""


class CopyDigests(Message, frozen=True, array_like=True):
    """A backup to the primary of its shard: the digests of its tensors, right after a step."""

    kind: ClassVar[int] = 114
    shard: Number
    generation: Number
    step: Number
    suspect: bool  # whether its memory has changed by itself since the check before
    digests: bytes


class ServerChecks:
    """The part of a server that checks its copies of shards."""

    messages: tuple[type[Message], ...] = (CopyDigests,)

    def __init__(self, handler: ShardHandler) -> None:
        self._replicas = handler.replicas
        checks, task = Checks(handler.config, _log.warning), f"ps:{handler.index}"
        if checks.every:
            handler.watch = lambda number: CopyWatch(handler, checks, task, number)
            for number, replica in handler.replicas.by_shard.items():
                replica.shard.state.watch = handler.watch(number)

    def authenticated(self, link: Link) -> None:
        """Does nothing: a backup that has digests sends them."""

    def received(self, link: Link, incoming: Incoming) -> None:
        """Takes the digests of a backup."""
        message, task = incoming.message, link.identity.task
        assert isinstance(message, CopyDigests)
        if link.identity.role != "ps":
            raise FrameError(f"{task} has no copy of a shard")
        replica = self._replicas.local(message.shard)
        if replica is None or replica.generation != message.generation:
            return  # the shards were divided anew meanwhile
        if isinstance(watch := replica.shard.state.watch, CopyWatch):
            taken = np.frombuffer(message.digests, np.uint64).tolist()
            watch.take(message.step, task, taken, suspect=message.suspect)

    def closed(self, link: Link, error: WireError | None) -> None:
        """Does nothing: what is missing is judged without."""

    def tick(self, now: float) -> None:
        """Does nothing: time changes nothing here."""


class _Kept(NamedTuple):
    """What an update has left, with its digests."""

    values: Values
    changes: int
    seal: Seal
    sent: int  # the digest of the values alone, as answers carry it


class CopyWatch(Watch):
    """Checks one copy of a shard."""

    def __init__(self, handler: ShardHandler, checks: Checks, task: str, number: int) -> None:
        self.task = task
        self._replicas, self._checks, self._number = handler.replicas, checks, number
        self._step = 0  # before the update under way
        self._kept: _Kept | None = None
        self._suspect = False  # since the last check
        self._names: Sequence[str] = ()  # of the tensors that have digests
        self._copies: dict[int, dict[str, Sequence[int]]] = defaultdict(dict)  # by step and task
        self._suspects: set[str] = set()
        self._refused = 0

    @property
    def log(self) -> ReplicationLog[Link] | None:
        """The log of the shard, if this is its primary."""
        replica = self._replicas.by_shard.get(self._number)
        return None if replica is None else replica.log

    def accepts(self, task: str, push: Push, gradients: PartBuffer) -> bool:
        checks, step = self._checks, push.pulled
        if not push.digest or not checks.wants(step, step + max(push.steps, 1)):
            return True
        with checks.spending():
            if digest(gradients.vectors) == push.digest:
                self._refused = 0
                return True
        self._refused += 1
        text = f"a gradient on its way from {task} to {self.task} has changed, after step {step}"
        checks.found(text, stops=checks.action == "stop" or self._refused > _MOST_REFUSALS)
        return checks.action == "warn"  # else it comes again, over another link

    def before_change(self, step: int, values: Values) -> None:
        kept, self._step, self._kept = self._kept_of(values), step, None
        if kept is None:
            return
        with self._checks.spending():
            change = kept.seal.changed()
        if change is None:
            return
        primary, action = self.log is not None, self._checks.action
        self._suspect = action == "warn" or not change.bits
        self._checks.found(
            f"memory of {self.task}, {'primary' if primary else 'backup'} of shard {self._number}, "
            f"has changed by itself after step {step}: {change}"
        )
        if action == "heal" and change.bits:
            change.mend()
        elif action == "heal" and primary:
            self._leave("it cannot be put back")

    def after_change(self, step: int, values: Values) -> None:
        self._kept = None
        if not self._checks.wants(self._step, step):
            return
        with self._checks.spending():
            seal = Seal(by_parameter(values.buffer.layout, values.live(state=True)))
            self._kept = _Kept(values, values.changes, seal, digest(values.buffer.vectors))
        if self._checks.due(self._step, step):
            self._compare(step, seal)

    def digest(self, values: Values, sent: Sequence[torch.Tensor]) -> int:
        kept = self._kept_of(values)
        whole = kept is not None and len(sent) == len(values.buffer.vectors)
        return kept.sent if kept is not None and whole else 0

    def _kept_of(self, values: Values) -> _Kept | None:
        """Returns what the last update has left, unless values were loaded or written since."""
        kept = self._kept
        same = kept is not None and kept.values is values and kept.changes == values.changes
        return kept if same else None

    def status(self) -> Mapping[str, float | str]:
        return self._checks.status()

    # -- copies ----------------------------------------------------------------------------------

    def _compare(self, step: int, seal: Seal) -> None:
        replica = self._replicas.by_shard.get(self._number)
        suspect, self._suspect = self._suspect, False
        # Of the numbers of a parameter group, which are mostly alike, one is taken.
        taken = dict(zip([name for name, _ in seal.named], seal.digests, strict=True))
        self._names, found = [*taken], [*taken.values()]
        if replica is not None and replica.log is not None and replica.log.backups:
            self.take(step, self.task, found, suspect=suspect)
        elif replica is not None and replica.log is None and replica.source is not None:
            data, where = np.array(found, np.uint64).tobytes(), (self._number, replica.generation)
            replica.source.offer(CopyDigests(*where, step, suspect, data))

    def take(self, step: int, task: str, digests: Sequence[int], *, suspect: bool) -> None:
        """Takes the digests of a copy, in the primary, and judges where all are there."""
        log, copies = self.log, self._copies[step]
        copies[task] = digests
        self._suspects |= {task} if suspect else set()
        if log is not None and len(copies) == 1 + len(log.backups) and self.task in copies:
            del self._copies[step]
            self._judge(step, copies)
        for old in sorted(self._copies)[:-_MOST_STEPS]:
            del self._copies[old]

    def _judge(self, step: int, copies: Mapping[str, Sequence[int]]) -> None:
        verdict, action = judge(copies, self._suspects), self._checks.action
        self._suspects.clear()
        if verdict is None:
            self._checks.settled(self._number)
            return
        text = verdict.said(f"shard {self._number}", step, self._names)
        stops = action == "stop" or (action == "heal" and not verdict.good)
        self._checks.found(text, self._number, stops=stops)
        if action == "heal":
            self._refill(verdict)

    def _refill(self, verdict: Verdict) -> None:
        log, view = self.log, self._replicas.view
        for task in verdict.wrong:
            if task == self.task:
                self._leave(f"{', '.join(verdict.good)} have it as it should be")
            server = view.server(int(task.partition(":")[2]))
            if server is not None and log is not None:
                log.useless.add((server.index, server.incarnation))

    def _leave(self, why: str) -> None:
        """Ends this server, so that a backup takes its place; stops the job if there is none."""
        log = self.log
        text = f"{self.task} holds corrupted values of shard {self._number}: {why}"
        if log is None or not log.backups:
            self._checks.found(text, stops=True)
        error = CorruptedValues(f"{text}; it leaves, to be filled anew")
        error.others_go_on = True
        raise error


SERVERS = ServerPart(ServerChecks)
