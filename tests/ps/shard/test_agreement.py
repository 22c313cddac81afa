"""Several shards, and the moments at which one knows what another does not yet know."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest

from tests.ps.bench import ASYNC, SYNC, Bench, told
from trireme.cluster.view import View, WorkerEntry
from trireme.ps.leader.decisions import Decided, Measure, Members
from trireme.ps.messages import Applied, PullReply, PushReply, Refused, Stale
from trireme.ps.rule import Rule
from trireme.ps.shard.instructions import Instruction, Reply, Send
from trireme.ps.snapshot_messages import Snapshot
from trireme.wire.message import Message

Where = tuple[int, int, Message]
"""From which server, to which, and what."""


class Servers:
    """Shards that talk to each other when the test lets a message through."""

    def __init__(self, rule: Rule, count: int = 2, workers: Sequence[int] = (0, 1)) -> None:
        self.benches = [
            Bench(rule, server=server, servers=count, workers=workers) for server in range(count)
        ]
        self.wire: deque[Where] = deque()
        self.answers: dict[tuple[int, object], Message] = {}

    def view(self, server: int, number: int, *workers: tuple[int, int]) -> None:
        bench = self.benches[server]
        bench.view_number = number
        entries = tuple(WorkerEntry(*worker) for worker in workers)
        self.take(server, bench.shard.view(bench.now, View(number, (), entries)))

    def push(self, server: int, worker: int, value: float, incarnation: int = 1) -> None:
        self.take(server, self.benches[server].push(worker, 1, value, incarnation=incarnation))

    def take(self, server: int, out: Sequence[Instruction]) -> None:
        for instruction in out:
            if isinstance(instruction, Send):
                self.wire.append((server, instruction.shard, instruction.message))
            elif isinstance(instruction, Reply):
                self.answers[server, instruction.route] = instruction.message
        bench = self.benches[server]
        if bench.shard.due:
            self.take(server, bench.shard.go_on())

    def deliver(self, count: int | None = None) -> None:
        """Lets so many messages between servers through, or all that there are and come."""
        while self.wire and count != 0:
            source, target, message = self.wire.popleft()
            bench = self.benches[target]
            self.take(target, bench.shard.heard(bench.now, source, message))
            count = None if count is None else count - 1

    def values(self) -> list[float]:
        """Each server's number: all hold a part of the same vector."""
        return [b.value for b in self.benches if b.layout.parts(b.shard.number)[0].length]

    def verdict(self, server: int, route: object) -> object:
        answer = self.answers[server, route]
        assert isinstance(answer, PushReply)
        return answer.verdict


BOTH = ((0, 1), (1, 1))


@pytest.mark.parametrize("reached", [0, 1])
def test_a_worker_that_died_between_two_servers_is_in_the_round_of_neither(reached: int) -> None:
    servers = Servers(SYNC)
    servers.push(reached, 1, 50.0)
    for server in (0, 1):
        servers.push(server, 0, 2.0)
    servers.deliver()
    assert [bench.shard.state.step for bench in servers.benches] == [0, 0]
    for server in (0, 1):
        servers.view(server, 2, (0, 1))
        servers.deliver()
    assert [bench.shard.state.step for bench in servers.benches] == [1, 1]
    assert set(servers.values()) == {98.0}


def test_a_worker_that_died_after_both_had_its_update_is_in_the_round_of_both() -> None:
    servers = Servers(SYNC)
    for server in (0, 1):
        servers.push(server, 0, 2.0)
        servers.push(server, 1, 4.0)
    servers.view(1, 2, (0, 1))  # ps:1 has said what it holds, and now hears of the loss
    servers.deliver()
    servers.view(0, 2, (0, 1))
    assert [bench.shard.state.step for bench in servers.benches] == [1, 1]
    assert set(servers.values()) == {97.0}
    assert servers.verdict(1, "push 0.1") == Applied(1)


def test_a_newcomer_that_one_server_knows_and_the_other_does_not_yet() -> None:
    servers = Servers(SYNC)
    for server in (0, 1):
        servers.push(server, 0, 3.0)
    servers.push(1, 1, 6.0)
    servers.view(0, 2, *BOTH, (2, 1))
    servers.push(0, 1, 6.0)
    servers.deliver()
    # Neither has gone on without the other: the newcomer finds values of one step.
    assert [bench.shard.state.step for bench in servers.benches] == [0, 0]
    servers.view(1, 2, *BOTH, (2, 1))
    assert [told(b.pull(2))[0][1] for b in servers.benches] == [PullReply(0, False)] * 2
    for server in (0, 1):
        servers.push(server, 2, 9.0)
    servers.deliver()
    assert [bench.shard.state.step for bench in servers.benches] == [1, 1]
    assert set(servers.values()) == {94.0}


def test_two_starts_of_a_worker_are_not_mistaken_for_each_other() -> None:
    servers = Servers(SYNC)
    servers.push(1, 0, 2.0)
    servers.push(1, 1, 50.0)
    servers.view(0, 2, (0, 1), (1, 2))
    servers.push(0, 0, 2.0)
    servers.push(0, 1, 4.0, incarnation=2)
    servers.deliver()
    assert servers.benches[0].shard.state.step == 0, "ps:1 holds the update of the first start only"
    servers.view(1, 2, (0, 1), (1, 2))
    servers.push(1, 1, 4.0, incarnation=2)
    servers.deliver()
    assert [bench.shard.state.step for bench in servers.benches] == [1, 1]
    assert set(servers.values()) == {97.0}


def test_all_shards_hold_back_the_same_workers_though_one_has_a_newcomer_before_an_update() -> None:
    """Else a worker that shard 0 lets go on never makes the update that others wait for."""
    servers = Servers(Rule(aggregate=1, staleness=1), workers=(0, 1, 2))
    for worker in (1, 0):
        for server in (0, 1):
            servers.push(server, worker, 2.0)
    while servers.wire:
        if servers.wire[0][1] == 0:
            servers.deliver(1)
        else:
            servers.wire.popleft()  # the decision is lost, and comes with the next one
    assert [bench.shard.state.step for bench in servers.benches] == [2, 0]
    for server in (1, 0):
        servers.view(server, 2, *BOTH, (2, 2))
    servers.deliver()
    assert [bench.shard.lags() for bench in servers.benches] == [{0: 0, 1: 0, 2: 0}] * 2
    for server, bench in enumerate(servers.benches):
        servers.take(server, bench.push(1, 2, 2.0, pulled=2))
    servers.deliver()
    assert [servers.verdict(server, "push 1.2") for server in (0, 1)] == [Applied(3)] * 2


def test_a_decision_that_was_lost_comes_with_the_next_one() -> None:
    servers = Servers(SYNC)
    for server in (0, 1):
        for worker in (0, 1):
            servers.push(server, worker, 2.0)
    servers.deliver(1)
    assert servers.benches[0].shard.state.step == 1
    servers.wire.clear()  # the decision never arrives
    servers.view(0, 2, *BOTH)
    servers.deliver()
    assert [bench.shard.state.step for bench in servers.benches] == [1, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_norms_of_a_round_whose_members_change_while_they_are_asked_for(workers: int) -> None:
    rule = Rule(aggregate=0, staleness=0, clip_norm=1000.0)
    servers = Servers(rule, workers=(0, 1, 2))
    everybody = [(worker, 1) for worker in range(3)]
    for worker in range(3):
        servers.push(1, worker, 6.0 * (worker + 1))
    for worker in range(workers):
        servers.push(0, worker, 6.0 * (worker + 1))
    servers.deliver()
    servers.view(0, 2, *everybody[:workers])
    proposal = servers.wire[-1][2]
    pushes = tuple((worker, 1, 1) for worker, _ in everybody[:workers])
    assert isinstance(proposal, Decided)
    assert [each for each in proposal.decisions if not isinstance(each, Members)] == [
        Measure(0, pushes)
    ]
    servers.view(0, 3, *everybody[:workers], (3, 1))  # one more joins meanwhile
    servers.deliver()
    assert servers.benches[0].shard.state.step == 0
    servers.view(1, 3, *everybody[:workers], (3, 1))
    for server in (0, 1):
        servers.push(server, 3, 12.0)
    servers.deliver()
    assert [bench.shard.state.step for bench in servers.benches] == [1, 1]
    mean = (sum(6.0 * (worker + 1) for worker in range(workers)) + 12.0) / (workers + 1)
    assert set(servers.values()) == {100.0 - mean}


@pytest.mark.parametrize("rule", [SYNC, ASYNC], ids=["rounds", "committed pushes"])
def test_a_server_copies_nothing_before_it_is_at_the_step_of_the_others(rule: Rule) -> None:
    """Even where nobody is left of those whose pushes would tell that it is behind."""
    servers = Servers(rule)
    for worker in (0, 1):
        for server in (0, 1):
            servers.push(server, worker, 4.0)
    behind = servers.benches[1]
    while servers.wire and servers.wire[0][1] == 0:  # server 0 hears all, and ps:1 nothing
        servers.deliver(1)
    step = servers.benches[0].shard.state.step
    assert behind.shard.state.step < step
    for server, bench in enumerate(servers.benches):
        servers.take(server, bench.snapshot())
    assert not any(isinstance(each, Snapshot) for each in servers.answers.values())
    servers.deliver()
    copies = [each for each in servers.answers.values() if isinstance(each, Snapshot)]
    assert [copy.step for copy in copies] == [2 if rule is ASYNC else 1] * 2


def test_a_copy_is_of_one_point_though_pushes_come_in_between() -> None:
    servers = Servers(ASYNC)
    servers.take(1, servers.benches[1].snapshot(state=True))
    for worker in (0, 1):
        for server in (0, 1):
            servers.push(server, worker, 4.0)
    servers.take(0, servers.benches[0].snapshot(state=True))
    servers.deliver()
    first, second = (each for each in servers.answers.values() if isinstance(each, Snapshot))
    assert first.step == second.step
    assert first.workers == second.workers
    assert [bench.shard.state.step for bench in servers.benches] == [2, 2]


def test_a_copy_that_not_every_shard_was_asked_for_holds_nobody_up() -> None:
    servers = Servers(SYNC)
    servers.take(0, servers.benches[0].snapshot())
    for worker in (0, 1):
        for server in (0, 1):
            servers.push(server, worker, 4.0)
    servers.deliver()
    assert [bench.shard.state.step for bench in servers.benches] == [1, 1]
    (wait,) = servers.benches[0].shard.waits(servers.benches[0].now)
    assert (wait.worker, wait.notice.names) == (0, ("ps:1",))
    assert wait.notice.reason == "a copy of every shard"


def test_a_copy_is_not_made_twice() -> None:
    """Its answer was lost: here it would be of a later point than at the other shard."""
    servers = Servers(ASYNC)
    for server, bench in enumerate(servers.benches):
        servers.take(server, bench.snapshot())
    servers.deliver()
    ((_, again),) = told(servers.benches[1].snapshot())
    assert again == Refused("busy", "the copy was made already", 1)


# The end -----------------------------------------------------------------------------------------


def test_every_shard_learns_of_the_end_and_what_comes_after_it_is_stale() -> None:
    servers = Servers(Rule(max_steps=1))
    for server in (0, 1):
        servers.push(server, 0, 4.0)
    servers.deliver()
    servers.push(1, 1, 50.0)
    assert servers.verdict(1, "push 1.1") == Stale(1)
    servers.push(0, 1, 50.0)
    assert servers.verdict(0, "push 1.1") == Stale(1)
    assert set(servers.values()) == {96.0}


def test_what_one_shard_holds_at_the_end_is_stale_at_all() -> None:
    servers = Servers(Rule(max_steps=1))
    servers.push(1, 1, 50.0)
    for server in (0, 1):
        servers.push(server, 0, 4.0)
    servers.deliver()
    assert servers.verdict(1, "push 1.1") == Stale(1)


# Asynchronous pushes ---------------------------------------------------------------------------


@pytest.mark.parametrize("reached", [0, 1, 2])
def test_a_push_that_reached_only_some_servers_is_on_none_once_its_worker_is_out(
    reached: int,
) -> None:
    servers = Servers(ASYNC, count=3)
    for server in {0, 1, 2} - {reached}:
        servers.push(server, 1, 50.0)
    servers.deliver()
    assert [bench.shard.state.step for bench in servers.benches] == [0, 0, 0]
    for server in (0, 1, 2):
        servers.view(server, 2, (0, 1))
        servers.push(server, 0, 2.0)
    servers.deliver()
    assert [bench.shard.state.step for bench in servers.benches] == [1, 1, 1]
    assert set(servers.values()) == {98.0}
    assert all(not bench.shard.waits(bench.now) for bench in servers.benches)


def test_a_push_that_all_servers_have_is_on_all_though_its_worker_is_gone_at_some() -> None:
    servers = Servers(ASYNC)
    for server in (0, 1):
        servers.push(server, 1, 4.0)
    servers.view(1, 2, (0, 1))  # ps:1 has said what it has, and now hears of the loss
    servers.deliver()
    servers.view(0, 2, (0, 1))
    servers.deliver()
    assert [bench.shard.state.step for bench in servers.benches] == [1, 1]
    assert set(servers.values()) == {96.0}
    tables = [bench.table for bench in servers.benches]
    assert tables[0] == tables[1]
    assert tables[0][1].applied == 1


def test_servers_apply_pushes_in_the_order_of_the_first() -> None:
    servers = Servers(ASYNC)
    servers.push(0, 0, 1.0)
    servers.push(0, 1, 2.0)
    servers.push(1, 1, 2.0)
    servers.push(1, 0, 1.0)
    servers.deliver()
    for server in (0, 1):
        assert servers.verdict(server, "push 1.1") == Applied(1)
        assert servers.verdict(server, "push 0.1") == Applied(2)


def test_a_worker_that_was_started_anew_pushes_while_its_old_push_is_kept() -> None:
    servers = Servers(ASYNC)
    for server in (0, 1):
        servers.push(server, 1, 4.0)
    for server in (1, 0):
        servers.view(server, 2, (0, 1), (1, 2))
        servers.push(server, 1, 8.0, incarnation=2)
    servers.deliver()
    # Server 0 heard of the old push under its new view: it dropped it, and so does ps:1.
    assert [bench.shard.state.step for bench in servers.benches] == [1, 1]
    assert set(servers.values()) == {92.0}


def test_who_waits_for_a_push_to_reach_every_server_is_told_which_it_has_not_reached() -> None:
    servers = Servers(ASYNC, count=3)
    servers.push(0, 1, 4.0)
    servers.push(2, 1, 4.0)
    servers.deliver()
    waits = [bench.shard.waits(bench.now) for bench in servers.benches]
    assert [[(w.worker, w.notice.names) for w in told] for told in waits] == [
        [(1, ("ps:1",))],
        [],
        [(1, ("ps:0",))],
    ]
