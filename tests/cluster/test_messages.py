from __future__ import annotations

import msgspec
import pytest

from trireme.cluster.messages import (
    CLUSTER_CATALOG,
    CLUSTER_MESSAGES,
    CaughtUp,
    ClusterStatus,
    CopyLost,
    Dismissed,
    Heartbeat,
    JobOver,
    JobOverHeard,
    Join,
    Leave,
    LinkLost,
    ReadyToSwitch,
    Scale,
    Scaled,
    TaskStatus,
    ViewChanged,
)
from trireme.cluster.view import ServerEntry, View, WorkerEntry
from trireme.errors import FrameError
from trireme.wire.message import Message

VIEW = View(3, (ServerEntry(0, 1, "tcp://a:1"),), (WorkerEntry(1, 2),))
TASK = TaskStatus("ps", 0, "live", "it joined", 1, "h", 7, "tcp://a:1", 0.5, {"step": 3})


@pytest.mark.parametrize(
    "message",
    [
        Join("worker", 1, 0, "host", 42, ""),
        Heartbeat({"step": 12, "loss": 0.25, "phase": "training"}),
        ViewChanged(VIEW),
        Leave("failed", "ValueError: x"),
        JobOver("failed", "worker:1", "ValueError: x"),
        JobOverHeard(),
        ClusterStatus("running", "every task has come", 3, (), (TASK,)),
        CaughtUp(3, 1, 2, 4),
        CopyLost(3, 1, 2, 4),
        LinkLost(3, 1, 2, 4),
        ReadyToSwitch(7, 3, 1),
        Scale(servers=3),
        Scaled(3, 2, ("ps:2",), ()),
        Dismissed("the job was made smaller"),
    ],
)
def test_messages_come_back_as_they_were(message: Message) -> None:
    assert CLUSTER_CATALOG.decode(message.kind, CLUSTER_CATALOG.encode(message)) == message


def test_kinds_are_the_clusters() -> None:
    kinds = [message.kind for message in CLUSTER_MESSAGES]
    assert len(set(kinds)) == len(kinds)
    assert all(16 <= kind <= 63 for kind in kinds)


def test_an_unknown_outcome_is_malformed() -> None:
    with pytest.raises(FrameError, match="Leave"):
        CLUSTER_CATALOG.decode(Leave.kind, msgspec.msgpack.encode(["exploded", ""]))


def test_who_leaves_may_say_no_more_than_how() -> None:
    assert Leave("finished") == Leave("finished", "")
