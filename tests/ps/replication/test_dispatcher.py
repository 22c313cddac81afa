"""What one shard says to another while no connection is there, it says over the next one."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.ps.leader.decisions import Held
from trireme.ps.replication.dispatcher import Dispatcher
from trireme.ps.shard.instructions import Send
from trireme.ps.shard.shard import Shard
from trireme.wire.handshake import Identity


@dataclass(eq=False)
class Link:
    identity: Identity
    opened_here: bool = True
    number: int = 0


def test_the_last_message_is_sent_over_a_new_connection() -> None:
    dispatcher = Dispatcher[Link](Shard(1))
    messages = [Held(0, ((0, 1, sequence),)) for sequence in (301, 302)]
    for message in messages:
        assert dispatcher.link_for(Send(0, message)) is None
    link = Link(Identity("job", "ps:0"))
    assert dispatcher.speaks(link, 0) == [messages[1]]
    assert dispatcher.link_for(Send(0, messages[0])) is link
    assert dispatcher.last_sent(0) == [messages[0]]
    assert dispatcher.last_sent(1) == []
