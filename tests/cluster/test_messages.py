from __future__ import annotations

import msgspec
import pytest

from trireme.cluster.messages import (
    CLUSTER_CATALOG,
    CLUSTER_MESSAGES,
    MAX_DETAILS,
    ClusterStatus,
    Heartbeat,
    JobOver,
    JobOverHeard,
    Join,
    Leave,
    TaskStatus,
    ViewChanged,
    clip_details,
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
        Leave("failed", "ValueError: x", "Traceback ..."),
        JobOver("failed", "worker:1", "ValueError: x", "Traceback ..."),
        JobOverHeard(),
        ClusterStatus("running", "every task has come", 3, (), (TASK,)),
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
        CLUSTER_CATALOG.decode(Leave.kind, msgspec.msgpack.encode(["exploded", "", ""]))


def test_who_leaves_may_say_no_more_than_how() -> None:
    assert Leave("finished") == Leave("finished", "", "")


def test_short_details_are_kept() -> None:
    assert clip_details("Traceback\n  ü") == "Traceback\n  ü"
    assert clip_details("x" * MAX_DETAILS) == "x" * MAX_DETAILS


def test_long_details_keep_their_end() -> None:
    clipped = clip_details("é" * MAX_DETAILS + "ValueError: the end")
    assert len(clipped.encode()) <= MAX_DETAILS
    assert clipped.endswith("éValueError: the end")
    assert "left out" in clipped.splitlines()[0]


def test_details_that_are_not_text_can_be_sent() -> None:
    clip_details("\udcff" * (2 * MAX_DETAILS)).encode()
    assert clip_details("a\udcffb") == "a?b"
