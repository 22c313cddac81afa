"""Two servers that reach the coordinator and not each other: what becomes of their copies."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.cluster.driver import Job
from trireme.cluster.coordinator import resumed
from trireme.cluster.messages import Heartbeat, HeartbeatHeard, LinkLost
from trireme.cluster.progress import BUSY, STEPS


def report(job: Job, primary: int, server: int, *, deaf: int | None = None) -> None:
    """A primary reports another server with two heartbeats; the coordinator answers both."""
    connections = [job.held[f"ps:{each}"] for each in (primary, server)]
    say_lost(job, primary, server)
    job.now += 0.25
    for each, connection in zip((primary, server), connections, strict=True):
        status = job.state.tasks[f"ps:{each}"].status
        job.say(connection, Heartbeat(dict(status), 1.0 if each == deaf else job.now))
    say_lost(job, primary, server)


def say_lost(job: Job, primary: int, server: int) -> None:
    """Every shard of a primary that needs another server says that it makes no progress with it."""
    entry = job.view.server(server)
    assert entry is not None
    for number, shard in enumerate(job.view.shards):
        if shard.primary == primary:
            message = LinkLost(job.view.generation, number, server, entry.incarnation)
            job.say(job.held[f"ps:{primary}"], message)


def without_joining(job: Job) -> bool:
    return not job.view.next_shards and not any(shard.joining for shard in job.view.shards)


def test_a_copy_without_progress_is_dropped_and_filled_elsewhere() -> None:
    job = Job()
    assert job.view.shards[1].copies == (1, 2)
    report(job, 1, 2)
    assert job.view.shards[1].copies == (1,)
    assert "ps:1 and ps:2 make no progress with each other" in job.reason
    job.settle()
    copies = [shard.copies for shard in job.view.shards]
    assert all(len(each) == 2 for each in copies)
    assert not any({1, 2} == set(each) for each in copies)


@pytest.mark.parametrize("primary", [0, 1])
def test_who_keeps_the_copies_has_heard_the_coordinator_since(primary: int) -> None:
    """A server that hears nobody, and is heard for a while, is about to be lost itself."""
    job = Job(servers=2)
    before = job.view
    for _ in range(3):
        report(job, primary, 1 - primary, deaf=0)
    assert job.view == before
    job.lose("ps:0")
    assert [shard.copies for shard in job.view.shards] == [(1,), (1,)]
    assert job.view.life == before.life


def test_both_are_asked_whether_they_hear_the_coordinator() -> None:
    job = Job(servers=2)
    entry = job.view.server(1)
    assert entry is not None
    job.say(job.held["ps:0"], LinkLost(job.view.generation, 0, 1, entry.incarnation))
    asked = (HeartbeatHeard(job.now),)
    assert job.sent == [(job.held[name], *asked) for name in ("ps:0", "ps:1")]
    job.say(job.held["ps:0"], LinkLost(job.view.generation, 0, 1, entry.incarnation))
    assert job.sent == [], "once"


def test_a_link_that_served_meanwhile_is_asked_about_again() -> None:
    job = Job(servers=2)
    before = job.view
    say_lost(job, 0, 1)
    job.pass_time(4.0)
    job.say(job.held["ps:0"], Heartbeat({}, job.now - 1.0))
    say_lost(job, 0, 1)
    assert job.view == before
    report(job, 0, 1)
    assert job.view != before


def test_a_server_that_has_had_no_time_to_answer_keeps_its_copies() -> None:
    job = Job()
    before = job.view.shards
    job.say(job.held["ps:2"], Heartbeat({STEPS: 5, BUSY: 1}))
    report(job, 1, 2)
    assert job.view.shards == before
    job.say(job.held["ps:2"], Heartbeat({STEPS: 6}))
    report(job, 1, 2)  # as it does with each heartbeat
    assert job.view.shards[1].copies == (1,)


def test_a_job_of_two_servers_goes_on_at_the_one_with_shard_0() -> None:
    job = Job(servers=2)
    report(job, 1, 0)
    assert [shard.copies for shard in job.view.shards] == [(0,), (0,)]
    job.settle()
    assert [shard.copies for shard in job.view.shards] == [(0,)], "ps:1 cannot reach shard 0"


def test_the_backup_of_shard_0_gives_way_with_all_its_roles() -> None:
    job = Job(servers=2)
    report(job, 0, 1)
    assert [shard.copies for shard in job.view.shards] == [(0,), (0,)]


def test_copies_are_placed_there_again_after_a_while_that_doubles() -> None:
    job = Job(servers=2, heartbeat_timeout=10.0)
    for seconds in (30.0, 60.0, 120.0):
        job.settle() if without_joining(job) else None
        report(job, 0, 1)
        job.pass_time(seconds - 1.0)
        job.settle()
        assert all(shard.copies == (0,) for shard in job.view.shards)
        job.pass_time(2.0)
        assert any(shard.joining for shard in job.view.next_shards)
        job.switch()
    job.fill()  # the link serves again
    assert job.state.shunned == {}
    job.settle()
    assert all(len(shard.copies) == 2 for shard in job.view.shards)


def test_the_last_copy_stays_and_the_coordinator_does_not_repeat_itself() -> None:
    job = Job(servers=2, replicas=1)
    before = job.view
    report(job, 1, 0)
    assert job.view == before and "make no progress" in job.reason
    report(job, 1, 0)
    assert job.view == before and job.reason == ""


def test_a_server_that_is_silent_itself_is_left_to_the_heartbeats() -> None:
    job = Job()
    before = job.view
    job.now += 5.0
    for name in ("ps:0", "ps:1"):
        job.say(job.held[name], Heartbeat({}))
    say_lost(job, 1, 2)
    say_lost(job, 1, 2)
    assert job.view == before


def test_a_new_process_of_a_server_begins_without_that_note() -> None:
    job = Job(wait_for_restart=300.0)
    report(job, 1, 2)
    assert [*job.state.shunned] == [2]
    job.lose("ps:2")
    assert job.state.shunned == {}


def test_a_coordinator_that_is_started_again_tries_the_link() -> None:
    job = Job(servers=2)
    report(job, 0, 1)
    state = resumed(5.0, job.state)
    assert state.shunned == {1: (5.0, 1)}


def test_a_server_that_went_with_the_coordinator_costs_the_other_no_copy() -> None:
    job = Job(servers=2)
    before = job.view
    job.state = resumed(job.now, job.state)  # in the next process of ps:0, which has yet to join
    job.held = {"ps:1": job.join("ps:1", incarnation=1, term=1)}
    say_lost(job, 1, 0)
    job.held["ps:0"] = job.join("ps:0", pid=8)
    assert [shard.primary for shard in job.view.shards] == [1, 1]
    assert (job.view.life, job.view.generation) == (before.life, before.generation)


@pytest.mark.parametrize("late", ["generation", "incarnation", "shard", "backup"])
def test_what_comes_too_late_is_ignored(late: str) -> None:
    job = Job()
    before = job.view
    generation, shard, incarnation = 1, 1, 1
    if late == "generation":
        generation = 2
    if late == "incarnation":
        incarnation = 7
    if late == "shard":
        shard = 2
    server = 1 if late == "backup" else 2
    job.say(job.held["ps:1"], LinkLost(generation, shard, server, incarnation))
    assert job.view == before


@given(
    servers=st.integers(2, 5),
    replicas=st.integers(1, 3),
    cuts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4),
)
@settings(deadline=None)
def test_the_job_comes_to_rest_whatever_links_are_broken(
    servers: int, replicas: int, cuts: list[tuple[int, int]]
) -> None:
    job = Job(servers=servers, replicas=min(replicas, servers))
    for one, other in cuts:
        one, other = one % servers, other % servers
        if one != other:
            report(job, one, other)
            job.settle()
    for shard in job.view.shards:
        assert len(shard.copies) <= max(1, replicas)
    job.pass_time(10_000.0)
    while job.view.next_shards or any(shard.joining for shard in job.view.shards):
        job.settle()
    assert all(len(shard.copies) == min(replicas, servers) for shard in job.view.shards)
    assert {shard.primary for shard in job.view.shards} == set(range(servers))
