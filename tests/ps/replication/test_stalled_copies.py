"""A copy that makes no progress is reported, named to who waits, and costs bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from trireme.cluster.messages import LinkLost
from trireme.cluster.view import ServerEntry, ShardEntry, View, WorkerEntry
from trireme.ps.messages import Retire, Waiting
from trireme.ps.replication import log as log_module
from trireme.ps.replication.messages import ConnectToLeader, ConnectToShard, Pulse, Replicated
from trireme.ps.replication.replicas import Peer, Replicas
from trireme.ps.shard.instructions import Reply
from trireme.wire.handshake import Identity

SERVERS = tuple(ServerEntry(index, 4 + index, f"tcp://{index}") for index in range(3))
WORKERS = (WorkerEntry(0, 1),)
BACKUP = View(1, SERVERS, WORKERS, (ShardEntry(0, 1, 0, (1,)),))
JOINING = View(1, SERVERS, WORKERS, (ShardEntry(0, 1, 0, (), (1,)),))
LOST = LinkLost(1, 0, 1, 5)


@dataclass(eq=False)
class Link:
    identity: Identity
    opened_here: bool = False
    number: int = 0


class Primary:
    """Server 0, the primary of one shard, and the time."""

    def __init__(self, view: View) -> None:
        self.now = 100.0
        self.replicas: Replicas[Link] = Replicas(0, patience=3.0)
        list(self.replicas.take(self.now, view))
        self.replica = self.replicas.by_shard[0]
        self.worker = Link(Identity("job", "worker:0", 1))
        assert self.replicas.addressed(self.worker, ConnectToShard(0, 1)) is self.replica
        self.taken: dict[Link, int] = {}
        self.replies: list[Reply] = []

    def follow(self) -> Link:
        link = Link(Identity("job", "ps:1"))
        other: Replicas[Link] = Replicas(1)
        other.incarnation = 5
        list(other.take(self.now, self.replicas.view))
        assert self.replicas.followed(link, other.by_shard[0].follows(5)) is not None
        return link

    def view(self, view: View) -> None:
        self._take(output for _, output in self.replicas.take(self.now, view))

    def ask(self, raw: Any = ()) -> None:
        message = Retire()
        self.replica.dispatcher.admit(self.worker, message)
        self._take(self.replica.request(self.now, self.worker, "route", message, None, raw))

    def wait(self, seconds: float) -> None:
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            self._take(self.replica.tick(self.now, lambda link: self.taken.get(link, 0)))
            self.replicas.look(self.now)

    def confirm(self, link: Link) -> None:
        self._take(self.replica.confirmed(link, Replicated(self.replica.position)))

    def _take(self, outputs: Any) -> None:
        self.replies += [each for each in outputs if isinstance(each, Reply)]

    @property
    def notices(self) -> list[Waiting]:
        return [each.message for each in self.replies if isinstance(each.message, Waiting)]


@pytest.mark.parametrize("view", [BACKUP, JOINING], ids=["backup", "joining"])
def test_a_copy_that_never_connects_is_reported(view: View) -> None:
    primary = Primary(view)
    primary.wait(2.9)
    assert primary.replicas.reports() == []
    primary.wait(0.3)
    assert primary.replicas.reports() == [LOST]


def test_a_backup_that_confirms_nothing_is_reported_and_named_to_who_waits() -> None:
    primary = Primary(BACKUP)
    link = primary.follow()
    primary.wait(20.0)
    assert primary.replicas.reports() == []  # it owes nothing
    primary.ask()
    primary.wait(2.8)
    assert primary.replicas.reports() == []
    primary.wait(0.4)
    assert primary.replicas.reports() == [LOST]
    primary.wait(5.0)
    assert {(each.reason, each.names) for each in primary.notices} == {
        ("a copy of the update", ("ps:1",))
    }
    primary.confirm(link)
    primary.wait(0.1)
    assert primary.replicas.reports() == []  # it was slow, and is not dropped


def test_a_backup_that_confirms_now_and_then_is_kept() -> None:
    primary = Primary(BACKUP)
    link = primary.follow()
    for _ in range(5):
        primary.ask()
        primary.wait(2.0)
        assert primary.replicas.reports() == []
        primary.confirm(link)


def test_a_copy_to_which_bytes_still_leave_is_kept() -> None:
    """The state of a large shard takes long on a slow link, and is confirmed at its end."""
    primary = Primary(BACKUP)
    link = primary.follow()
    primary.ask()
    for sent in range(1, 20):
        primary.taken[link] = sent
        primary.wait(1.0)
        assert primary.replicas.reports() == []
    primary.wait(3.1)
    assert primary.replicas.reports() == [LOST]


@pytest.mark.parametrize("connected", [False, True])
def test_a_joining_copy_that_lacks_too_much_is_waited_for_or_soon_dropped(connected: bool) -> None:
    primary = Primary(JOINING)
    log = primary.replica.log
    assert log is not None
    if connected:
        primary.follow()
    primary.wait(1.2)
    piece = [memoryview(bytearray(1000))]
    with patch.object(log_module, "BACKLOG_BYTES", 5000):
        for _ in range(4):
            primary.ask(raw=piece)
        assert len(primary.replies) == 4 and primary.replicas.reports() == []
        for _ in range(6):
            primary.ask(raw=piece)
        assert len(primary.replies) == 4
        assert primary.replicas.reports() == ([] if connected else [LOST])
        alone = View(2, SERVERS, WORKERS, (ShardEntry(0, 1, 0),))
        primary.view(alone)
        assert len(primary.replies) - len(primary.notices) == 10 and log._bytes == 0


def test_a_joining_copy_has_time_to_connect_however_large_the_first_entries_are() -> None:
    primary = Primary(JOINING)
    with patch.object(log_module, "BACKLOG_BYTES", 500):
        primary.ask(raw=[memoryview(bytearray(1000))])
        primary.wait(0.5)
        assert len(primary.replies) == len(primary.notices) and primary.replicas.reports() == []
        primary.follow()
        primary.wait(2.0)
        assert primary.replicas.reports() == []


def test_a_copy_that_takes_its_first_state_over_is_waited_for_while_it_is_connected() -> None:
    """A state of many gigabytes takes longer than any heartbeat; its server's heart beats."""
    primary = Primary(JOINING)
    link = primary.follow()
    log = primary.replica.log
    assert log is not None
    log._receivers[1].confirmed = -1  # the state is sent, and not confirmed
    primary.taken[link] = 7
    primary.wait(3.3)
    assert primary.replicas.reports() == [LOST]  # bytes wait, and none leaves
    primary.taken[link] = 8
    primary.wait(0.1)
    primary.taken[link] = 0  # all have left
    primary.wait(60.0)
    assert primary.replicas.reports() == []
    primary.replica.closed(link)
    primary.wait(3.3)
    assert primary.replicas.reports() == [LOST]


class Speaker:
    """Server 1, whose shards speak with shard 0 at server 0, and the time."""

    def __init__(self, *shards: ShardEntry) -> None:
        self.now = 0.0
        self.replicas: Replicas[Link] = Replicas(1, patience=3.0)
        list(self.replicas.take(0.0, View(1, SERVERS, WORKERS, shards)))

    def connect(self, shard: int, *, follows: bool = False) -> Link:
        link = Link(Identity("job", "ps:0"), opened_here=True)
        assert self.replicas.connected(link, Peer(shard, follows, 0)) is not None
        return link

    def wait(self, *, hears: Link | None = None) -> list[Any]:
        for tenth in range(32):
            if hears is not None and tenth % 5 == 0:
                assert self.replicas.pulse(hears)
            self.now += 0.1
            self.replicas.look(self.now)
        return self.replicas.reports()


FIRST, SECOND, THIRD = (ShardEntry(at, at + 1, min(at, 1)) for at in range(3))


def test_a_primary_that_hears_nothing_of_shard_0_reports_that() -> None:
    """Be it without a connection, or over one that is cut: TCP needs ten seconds to notice."""
    speaker = Speaker(FIRST, SECOND)
    lost = LinkLost(1, 1, 0, 4)
    assert speaker.wait() == [lost]
    link = speaker.connect(1)
    assert speaker.wait(hears=link) == []
    assert speaker.wait() == [lost]
    assert speaker.wait(hears=link) == []
    speaker.replicas.closed(link)
    assert not speaker.replicas.pulse(link)
    assert speaker.wait() == [lost]


def test_each_shard_hears_over_its_own_connection() -> None:
    speaker = Speaker(FIRST, SECOND, THIRD)
    link = speaker.connect(2)
    speaker.connect(1)
    assert speaker.wait(hears=link) == [LinkLost(1, 1, 0, 4)]


def test_a_pulse_over_the_connection_of_a_backup_does_not_count() -> None:
    speaker = Speaker(ShardEntry(0, 1, 0, (1,)), SECOND)
    assert not speaker.replicas.pulse(speaker.connect(0, follows=True))


@pytest.mark.parametrize("place", [ServerEntry(0, 99, "tcp://9"), SERVERS[2]])
def test_who_has_just_become_primary_of_shard_0_is_not_accused_of_silence(
    place: ServerEntry,
) -> None:
    speaker = Speaker(FIRST, SECOND)
    assert speaker.wait()
    servers = tuple(place if each.index == place.index else each for each in SERVERS)
    moved = View(2, servers, WORKERS, (ShardEntry(0, 1, place.index), SECOND))
    list(speaker.replicas.take(speaker.now, moved))
    assert speaker.replicas.reports() == []
    speaker.replicas.look(speaker.now + 0.1)
    assert speaker.replicas.reports() == []
    assert speaker.wait() == [LinkLost(1, 1, place.index, place.incarnation)]


def test_a_connection_to_shard_0_begins_with_a_pulse_and_gets_none_once_it_is_closed() -> None:
    replicas: Replicas[Link] = Replicas(0)
    list(replicas.take(0.0, View(1, SERVERS, WORKERS, (FIRST, SECOND))))
    link = Link(Identity("job", "ps:1"))
    found = replicas.spoken(link, ConnectToLeader(1, 1))
    assert found is not None and found[1] == [Pulse()]
    assert replicas.speakers() == [link]
    found[0].closed(link)
    assert replicas.speakers() == []
