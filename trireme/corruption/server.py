"""What a server checks: pushes as they come, its memory between updates, and copies of shards.

At each check every copy of a shard takes digests right after the update that makes the step, and
the backups send theirs to the primary, which judges when it has all. Nobody waits for that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch

from trireme.corruption.checks import Checks
from trireme.corruption.digests import Seal, digest
from trireme.errors import CorruptedValues, FrameError
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import Push
from trireme.ps.replication.replica import Replica
from trireme.ps.server.handler import ShardHandler
from trireme.ps.server.service import ServerPart
from trireme.ps.shard.values.parameters import Values
from trireme.ps.shard.watch import Watch
from trireme.wire.connection import Incoming
from trireme.wire.message import Message, Number
from trireme.wire.service import Handler, Link

_log = logging.getLogger(__name__)


class CopyDigests(Message, frozen=True, array_like=True):
    """A backup to the primary of its shard: the digests of its tensors, right after a step."""

    kind: ClassVar[int] = 114
    shard: Number
    generation: Number
    step: Number
    digests: dict[str, int]  # by their names


class ServerChecks(Watch, Handler):
    """Checks the copies of shards that one server has, and handles the digests of others."""

    messages: tuple[type[Message], ...] = (CopyDigests,)

    def __init__(self, handler: ShardHandler) -> None:
        self.task = f"ps:{handler.index}"
        self._replicas = handler.replicas
        self._checks = Checks(handler.config, _log.warning)
        self._step = 0  # before the update under way
        # what an update has left, and the digest that answers carry
        self._kept: WeakKeyDictionary[Values, tuple[Seal, int]] = WeakKeyDictionary()
        # by shard, generation and step, and by task
        self._copies: dict[tuple[int, int, int], dict[str, dict[str, int]]] = {}
        if self._checks.every:
            handler.watch = lambda number: self
            for replica in handler.replicas.by_shard.values():
                replica.shard.state.watch = self

    def replica(self, values: Values) -> Replica[Link] | None:
        """Returns the replica that has these values."""
        replicas = self._replicas.by_shard.values()
        return next((each for each in replicas if each.shard.state.values is values), None)

    def received(self, link: Link, incoming: Incoming) -> None:
        """Takes the digests of a backup."""
        message, task = incoming.message, link.identity.task
        assert isinstance(message, CopyDigests)
        if link.identity.role != "ps":
            raise FrameError(f"{task} has no copy of a shard")
        replica = self._replicas.local(message.shard)
        if replica is not None and replica.generation == message.generation:
            self._take(replica, message.step, task, message.digests)

    def accepts(self, task: str, push: Push, gradients: PartBuffer) -> bool:
        checks, step = self._checks, push.pulled
        if not push.digest or not checks.wants(step, step + max(push.steps, 1)):
            return True
        with checks.spending():
            taken = digest(gradients.vectors)
        if taken == push.digest:
            return True
        way = f"on its way from {task} to {self.task}"
        checks.found(f"a gradient {way} has changed, after step {step}")
        return not checks.heals  # else it comes again, over another link

    def before_change(self, step: int, values: Values) -> None:
        self._step, (kept, _) = step, self._kept.pop(values, (None, 0)) if self._kept else (None, 0)
        change = self._checks.changed(kept, values.changes)
        if change is None or (replica := self.replica(values)) is None:
            return
        self._checks.found(
            f"memory of {self.task}, {'backup' if replica.log is None else 'primary'} of shard "
            f"{replica.number}, has changed by itself after step {step}: {change}"
        )
        if self._checks.heals and not change.bits:
            self._leave(replica, "it cannot be put back")
        elif self._checks.heals:
            change.mend()

    def after_change(self, step: int, values: Values) -> None:
        if not self._checks.wants(self._step, step):
            return
        with self._checks.spending():
            seal = Seal(values.named(), values.changes)
            self._kept[values] = seal, digest(values.buffer.vectors)
        replica = self.replica(values)
        if replica is not None and self._checks.due(self._step, step):
            self._take(replica, step, self.task, seal.digests)

    def digest(self, values: Values, sent: Sequence[torch.Tensor]) -> int:
        seal, taken = self._kept.get(values, (None, 0)) if self._kept else (None, 0)
        same = seal is not None and seal.writes == values.changes
        return taken if same and len(sent) == len(values.buffer.vectors) else 0

    def status(self) -> Mapping[str, float | str]:
        return self._checks.status()

    def _take(self, replica: Replica[Link], step: int, task: str, digests: dict[str, int]) -> None:
        """Takes the digests of a copy; the primary has those of all, and judges."""
        log, number = replica.log, replica.number
        if log is None:
            if replica.source is not None:
                replica.source.offer(CopyDigests(number, replica.generation, step, digests))
            return
        copies = self._copies.setdefault((number, replica.generation, step), {})
        copies[task] = digests
        if self.task not in copies or len(copies) <= len(log.backups):
            return
        self._copies = {
            key: held for key, held in self._copies.items() if key[0] != number or key[2] > step
        }
        good, wrong = self._checks.compare(f"shard {number}", step, copies)
        for other in wrong:
            if other == self.task:
                self._leave(replica, f"{', '.join(good)} have it as it should be")
            server = self._replicas.view.server(int(other.partition(":")[2]))
            if server is not None:
                log.useless.add((server.index, server.incarnation))

    def _leave(self, replica: Replica[Link], why: str) -> None:
        """Ends this server, so that another copy takes its place; the job if there is none."""
        error = CorruptedValues(f"{self.task} has a corrupted shard {replica.number}: {why}")
        error.others_go_on = replica.log is None or bool(replica.log.backups)
        raise error


SERVERS = ServerPart(ServerChecks)
