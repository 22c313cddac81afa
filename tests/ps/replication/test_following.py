"""Which replicas a primary can bring up to date, and over which connection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from trireme.cluster.messages import CaughtUp, CopyLost, ReadyToSwitch
from trireme.cluster.view import ServerEntry, ShardEntry, View, WorkerEntry
from trireme.ps.messages import PullExtra, Retire
from trireme.ps.replication.log import EVENTS, Tell
from trireme.ps.replication.messages import (
    ConnectToShard,
    Fill,
    FollowPrimary,
    Replicate,
    Replicated,
)
from trireme.ps.replication.replica import decoded
from trireme.ps.replication.replicas import Peer, Replicas
from trireme.ps.server.handler import ShardHandler
from trireme.ps.shard.instructions import Reply
from trireme.wire.connection import Incoming
from trireme.wire.handshake import Identity
from trireme.wire.message import Message

SERVERS = tuple(ServerEntry(index, 1, f"address {index}") for index in range(3))
WORKERS = (WorkerEntry(0, 1),)
FIRST = View(1, SERVERS, WORKERS, (ShardEntry(0, 1, 0, (1, 2)),))
AFTER = View(2, SERVERS[1:], WORKERS, (ShardEntry(0, 1, 1, (2,)),))
"""Server 0 is lost, and server 1 is the primary."""


@dataclass(eq=False)
class Link:
    identity: Identity
    opened_here: bool = False
    number: int = 0


def to(server: int) -> Link:
    return Link(Identity("job", f"ps:{server}"))


def servers() -> list[Replicas[Link]]:
    made = [Replicas[Link](index) for index in range(3)]
    for each in made:
        each.incarnation = 1
        take(each, FIRST)
    return made


def take(server: Replicas[Link], view: View) -> list[Any]:
    return [output for _, output in server.take(0.0, view)]


def follow(primary: Replicas[Link], other: Replicas[Link], link: Link) -> list[Any] | None:
    taken = primary.followed(link, other.by_shard[0].follows(1))
    return None if taken is None else taken[1]


def retire(primary: Replicas[Link], generation: int = 1) -> list[Any]:
    """A worker asks something: an entry."""
    link = Link(Identity("job", "worker:0", 1))
    replica = primary.addressed(link, ConnectToShard(0, generation))
    assert replica is not None
    replica.dispatcher.admit(link, Retire())
    return list(replica.request(0.0, link, object(), Retire()))


def hear(server: Replicas[Link], outputs: Iterable[Any]) -> None:
    """A backup applies the entries among outputs."""
    for output in outputs:
        if isinstance(output, Tell) and isinstance(output.message, Replicate):
            list(server.by_shard[0].replicate(output.message, decoded(output.message), None, None))


def test_who_lacks_entries_of_the_primary_before_is_filled_again() -> None:
    old, promoted, other = servers()
    assert follow(old, promoted, to(1)) is not None
    hear(promoted, retire(old))
    for each in (promoted, other):
        take(each, AFTER)
    assert follow(promoted, other, to(2)) is None
    assert promoted.by_shard[0].reports() == [CopyLost(1, 0, 2, 1)]


def test_who_has_heard_other_entries_of_the_primary_before_is_filled_again() -> None:
    """As many entries are not the same entries: nobody but the other one was told of its."""
    old, promoted, other = servers()
    assert follow(old, other, to(2)) is not None
    hear(other, retire(old))
    for each in (promoted, other):
        take(each, AFTER)
    assert promoted.by_shard[0].position == other.by_shard[0].position == 1
    assert follow(promoted, other, to(2)) is None
    assert promoted.by_shard[0].reports() == [CopyLost(1, 0, 2, 1)]


def test_who_has_the_same_entries_goes_on() -> None:
    old, promoted, other = servers()
    assert follow(old, promoted, to(1)) is not None and follow(old, other, to(2)) is not None
    told = retire(old)
    hear(promoted, told[:1])
    hear(other, told[:1])
    for each in (promoted, other):
        take(each, AFTER)
    sent = follow(promoted, other, to(2))
    assert sent is not None
    hear(other, sent)
    assert promoted.by_shard[0].position == other.by_shard[0].position == 2
    assert not promoted.by_shard[0].reports()


def test_a_backup_gathers_no_extra_values_for_answers_that_nobody_hears() -> None:
    old, promoted, _ = servers()
    assert follow(old, promoted, to(1)) is not None
    hear(promoted, retire(old))
    assert old.by_shard[0].shard.state.shows_extra
    assert not promoted.by_shard[0].shard.state.shows_extra
    take(promoted, AFTER)
    assert promoted.by_shard[0].shard.state.shows_extra


def test_extra_values_are_read_without_an_entry_and_shown_when_the_backups_have_them() -> None:
    """What a worker is shown is what no loss of a server takes back."""
    primary, *backups = servers()
    replica, links = primary.by_shard[0], [to(1), to(2)]
    for backup, link in zip(backups, links, strict=True):
        assert follow(primary, backup, link) is not None
    retire(primary)  # nobody has confirmed that
    worker, route = Link(Identity("job", "worker:0", 1)), object()
    assert list(replica.request(0.0, worker, route, PullExtra(1, ()))) == []
    assert replica.position == 1, "it is no entry"
    assert list(replica.confirmed(links[0], Replicated(1))) == []
    shown = [each.route for each in replica.confirmed(links[1], Replicated(1))]
    assert route in shown
    (at_once,) = replica.request(0.0, worker, route, PullExtra(1, ()))
    assert isinstance(at_once, Reply) and at_once.route is route


def test_what_an_old_connection_brings_late_replaces_nothing() -> None:
    primary, backup, _ = servers()
    old, new = to(1), to(1)
    old.number, new.number = 1, 2
    assert follow(primary, backup, new) is not None
    assert follow(primary, backup, old) is None
    assert [output.link for output in retire(primary) if isinstance(output, Tell)] == [new]
    primary.closed(old)
    assert list(primary.by_shard[0].confirmed(new, Replicated(1))) == []


def joining() -> tuple[Replicas[Link], Replicas[Link], list[Any]]:
    """Returns a primary, a server that joins and follows it, and what that is sent."""
    primary, joins = Replicas[Link](0), Replicas[Link](1)
    alone = (ShardEntry(0, 1, 0),)
    announced = (ShardEntry(0, 1, 0, (), (1,)),)
    take(primary, View(1, SERVERS[:2], WORKERS, alone))
    take(primary, View(2, SERVERS[:2], WORKERS, alone, next_shards=announced))
    for each in (primary, joins):
        each.incarnation = 1
        take(each, View(3, SERVERS[:2], WORKERS, announced, generation=2))
    link = to(1)
    taken = primary.followed(link, joins.by_shard[0].follows(1))
    assert taken is not None
    return primary, joins, taken[1]


def test_who_joins_has_caught_up_when_it_has_confirmed_what_it_was_filled_with() -> None:
    """It could be lost on its way: the server would be promoted with nothing."""
    primary, _, sent = joining()
    replica = primary.by_shard[0]
    assert [type(each.message) for each in sent] == [Fill]
    assert replica.reports() == []
    assert list(replica.confirmed(sent[0].link, Replicated(0))) == []
    assert replica.reports() == [CaughtUp(2, 0, 1, 1)]


def test_who_is_promoted_before_all_extra_values_have_come_has_not_begun() -> None:
    """A replica that has only some of its extra values has no valid state."""
    backup = servers()[1]
    replica = backup.by_shard[0]
    assert replica.began
    replica.shard.state.extension = cast(Any, SimpleNamespace(lacks=3))
    assert replica.lacks == 3
    assert replica.follows(1).lacks == 3
    take(backup, AFTER)
    assert replica.primary
    assert not replica.began
    assert replica.shard.state.extension is None


def test_what_was_not_confirmed_over_one_connection_is_not_over_the_next() -> None:
    """`FollowPrimary` says how far the replica is; it may be filled anew, and has nothing then."""

    class Wire(Link):
        connection = SimpleNamespace(destination=None)

        def offer(self, message: Message) -> None:
            said.append(message)

    said: list[Message] = []
    handler = ShardHandler(1, now=lambda: 0.0)
    handler.view(View(1, SERVERS[:2], WORKERS, (ShardEntry(0, 1, 0, (1,)),)), 1)
    for position in (1, 2):
        link: Any = Wire(to(0).identity, opened_here=True)
        handler.connected(link, Peer(0, True, 0))
        handler.turn_over()
        assert [type(each) for each in said] == [FollowPrimary]
        event = Replicate(position, 0.0, 0, 0, Retire.kind, EVENTS.encode(Retire()), 1)
        handler.received(link, Incoming(event, 0, [], 0))
        if position == 1:
            handler.closed(link, None)
            said.clear()
    handler.turn_over()
    assert said[1:] == [Replicated(2, 0)]


def test_who_was_filled_in_vain_is_filled_again() -> None:
    primary, joins, sent = joining()
    retire(primary, generation=2)
    primary.by_shard[0].closed(sent[0].link)
    again = primary.followed(to(1), joins.by_shard[0].follows(1))
    assert again is not None
    assert [type(each.message) for each in again[1]] == [Fill, Replicate]


def test_who_joins_is_filled_even_if_it_has_missed_how_this_life_began() -> None:
    """It was given up, held a copy of the life before, and hears of the present one only now."""
    zombie, primary = servers()[0], Replicas[Link](1)
    primary.incarnation = 1
    alone = (ServerEntry(1, 2, "address 1"),)
    take(primary, View(3, alone, WORKERS, (ShardEntry(0, 1, 1),), generation=2, life=1))
    again = (ServerEntry(0, 2, "address 0"), *alone)
    announced = (ShardEntry(0, 1, 1, (), (0,)),)
    take(primary, View(4, again, WORKERS, (ShardEntry(0, 1, 1),), 2, announced, 1))
    after = View(5, again, WORKERS, announced, generation=3, life=1)
    for each in (primary, zombie):
        take(each, after)
    zombie.incarnation = 2
    outputs = primary.followed(to(0), zombie.by_shard[0].follows(2))
    assert outputs is not None
    assert [type(each.message) for each in outputs[1] if isinstance(each, Tell)][:1] == [Fill]


def test_a_server_whose_first_view_announces_other_shards_says_when_it_has_stopped() -> None:
    """With its backup, once that has begun too."""
    primary, backup = Replicas[Link](0), Replicas[Link](1)
    announced = View(2, SERVERS[:2], WORKERS, (ShardEntry(0, 1, 0, (1,)),), 1, FIRST.shards)
    for each in (primary, backup):
        take(each, announced)
    replica = primary.by_shard[0]
    assert replica.shard.stopped and replica.reports() == []
    assert follow(primary, backup, to(1)) is not None
    assert replica.reports() == [ReadyToSwitch(2, 1, 0)]
    assert backup.by_shard[0].reports() == []
