"""What the parts of a simulated job are made by: the real ones, or ones with a planted bug."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tests.simulation.coordinator import Decide
from trireme.cluster.member_protocol import MemberProtocol
from trireme.cluster.membership import step
from trireme.cluster.view import LastChief
from trireme.ps.client.lanes import Lanes
from trireme.ps.client.protocol import ClientProtocol
from trireme.ps.replication.dispatcher import Dispatcher
from trireme.ps.shard.shard import Shard


@dataclass(frozen=True)
class Makers:
    """What the servers, clients and members of a job are made by, and who decides who they are.

    Attributes:
        patches: replace parts of the real code while a job runs.
    """

    shard: type[Shard] = Shard
    dispatcher: Callable[[Shard], Dispatcher[Any]] = Dispatcher
    lanes: Callable[..., Lanes] = Lanes
    protocol: Callable[..., ClientProtocol] = ClientProtocol
    member: Callable[..., MemberProtocol] = MemberProtocol
    membership: Decide = step
    last_chief: Callable[[int], LastChief] = LastChief
    patches: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
