"""The log of a primary, by hand."""

from __future__ import annotations

import pytest

from trireme.ps.messages import Retire
from trireme.ps.replication.log import Lent, ReplicationLog, Tell
from trireme.ps.shard.participants import Participant

BACKUP, NEWCOMER = "to ps:1", "to ps:2"


@pytest.mark.parametrize("lent", [None, Lent(7, ((0, 4),))], ids=["received", "lent"])
def test_a_joining_replica_is_sent_what_was_appended_and_not_what_lies_there_later(
    lent: Lent | None,
) -> None:
    """The answer to an event does not wait for it, and the memory is used again then."""
    log = ReplicationLog[str](0)
    log.members([1], [2])
    log.follow(BACKUP, 1, 1, 0)
    log.borrows(BACKUP, [7])
    memory = bytearray(b"once")
    told = list(log.append(0.0, Participant(0, 1), Retire(), [memoryview(memory)], lent))
    assert [(each.link, bytes(each.payload[0])) for each in told] == [(BACKUP, b"once")]
    memory[:] = b"then"
    followed = log.follow(NEWCOMER, 2, 1, 0)
    log.borrows(NEWCOMER, [7])
    assert followed is not None
    (entry,) = (each for each in followed if isinstance(each, Tell))
    assert not entry.message.memory  # type: ignore[attr-defined]
    assert [bytes(view) for view in entry.payload] == [b"once"]
