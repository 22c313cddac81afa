"""Broken links and stuck loops that are not noticed, or in vain, which the simulator must find."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import PropertyMock, patch

from msgspec.structs import replace

from trireme.cluster import membership, reconfiguration
from trireme.cluster.messages import LinkLost
from trireme.cluster.placement import Shards, emptied
from trireme.cluster.state import DecisionBuilder, Task
from trireme.ps.replication.log import ReplicationLog
from trireme.ps.replication.replicas import Replicas
from trireme.ps.server.loop_watch import LoopWatch


def reports_no_copy_without_progress() -> AbstractContextManager[Any]:
    """A primary does not say that a copy makes no progress."""
    return patch.object(ReplicationLog, "overdue", PropertyMock(return_value=frozenset()))


def reports_no_missing_connection_to_shard_0() -> AbstractContextManager[Any]:
    """A primary does not say that it hears nothing of that of shard 0."""
    return patch.object(Replicas, "look", lambda self, now: None)


def hears_of_no_broken_link() -> AbstractContextManager[Any]:
    """The coordinator ignores what primaries say of links."""
    return patch.object(membership, "take_link_lost", lambda builder, task, message: None)


def asks_not_who_hears() -> AbstractContextManager[Any]:
    """The coordinator takes copies from a server, though it may be the other one that is deaf."""

    def lost(builder: DecisionBuilder, task: Task, message: LinkLost) -> None:
        for server in [each for each in builder.state.tasks.values() if each.role == "ps"]:
            builder.update_task(replace(server, hears=math.inf))
        reconfiguration.take_link_lost(builder, task, message)

    return patch.object(membership, "take_link_lost", lost)


def places_copies_there_at_once() -> AbstractContextManager[Any]:
    """A copy that was dropped is filled again over the same link, again and again."""
    return patch.multiple(reconfiguration, SHUNNED_TIMEOUTS=0, MOST_SHUNNED_TIMEOUTS=0)


def takes_the_copies_alone() -> AbstractContextManager[Any]:
    """A primary that does not reach that of shard 0 stays, and only its copies are dropped."""

    def emptied_of_copies(shards: Shards, number: int, server: int) -> Shards:
        return shards if shards[number].primary == server else emptied(shards, number, server)

    return patch.object(reconfiguration, "emptied", emptied_of_copies)


def takes_a_stuck_loop_for_live() -> AbstractContextManager[Any]:
    """Each heartbeat is a sign that the loop goes on."""

    def look(self: Any, now: float, turns: int, worked: float) -> bool:
        self.signs += 1
        return True

    return patch.object(LoopWatch, "look", look)


def joins_again_while_it_is_stuck() -> AbstractContextManager[Any]:
    """A server that was given up, because its loop is stuck, joins again at once."""
    return patch.object(LoopWatch, "overdue", PropertyMock(return_value=False))
