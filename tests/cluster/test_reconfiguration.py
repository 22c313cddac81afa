"""Servers that are lost, that come, and that go: who is primary, and what is copied to whom."""

from __future__ import annotations

import pytest

from tests.cluster.driver import Job
from trireme.cluster.membership import Tick
from trireme.cluster.messages import CaughtUp, CopyLost, JobOver, ReadyToSwitch, ViewChanged
from trireme.cluster.reconfiguration import REBALANCE_SECONDS, SWITCH_SECONDS
from trireme.cluster.state import cluster_status
from trireme.cluster.view import ShardEntry

FIRST = [(0, 85, (0, 1)), (85, 170, (1, 2)), (170, 256, (2, 0))]


class TestPromotion:
    def test_the_first_view_has_copies_on_different_servers(self) -> None:
        job = Job()
        assert job.placement == FIRST
        assert (job.view.generation, job.view.life, job.view.next_shards) == (1, 0, ())

    @pytest.mark.parametrize("survives_loss", [False, True])
    def test_the_backup_of_a_lost_server_is_primary_at_once(self, survives_loss: bool) -> None:
        job = Job(survives_loss=survives_loss)
        job.lose("ps:0")
        assert job.state.over is None
        assert job.placement == [(0, 85, (1,)), (85, 170, (1, 2)), (170, 256, (2,))]
        assert (job.view.generation, job.view.life) == (1, 0)
        assert [server.index for server in job.view.servers] == [1, 2]
        assert job.view.next_shards == (), "what is missing is planned by a view of its own"
        assert {number for _, number in job.views_sent()} == {job.view.number}

    def test_a_process_that_comes_in_its_place_is_empty(self) -> None:
        job = Job()
        job.hang_up(job.held.pop("ps:0"))
        job.come("ps:0")
        assert job.placement[0] == (0, 85, (1,))
        entry = job.view.server(0)
        assert entry is not None and entry.incarnation == 2

    def test_a_server_that_was_silent_and_comes_back_is_empty_too(self) -> None:
        job = Job(heartbeat_timeout=5.0)
        job.held.pop("ps:1")
        job.pass_time(5.0)
        assert job.state.tasks["ps:1"].state == "lost"
        job.held["ps:1"] = job.join("ps:1", incarnation=1)
        assert all(1 not in shard.copies for shard in job.view.shards)
        entry = job.view.server(1)
        assert entry is not None and entry.incarnation == 2

    def test_a_silent_server_with_the_last_copy_is_waited_for_longer(self) -> None:
        job = Job(2, 2, heartbeat_timeout=5.0)
        job.lose("ps:0")
        job.held.pop("ps:1")
        job.pass_time(10.0)
        assert job.state.tasks["ps:1"].state == "live"
        assert job.view.life == 0
        job.pass_time(5.0)
        assert job.state.tasks["ps:1"].state == "lost"

    def test_of_two_silent_servers_the_first_is_lost_and_the_other_waited_for(self) -> None:
        job = Job(2, 2, heartbeat_timeout=5.0)
        for name in ("ps:0", "ps:1"):
            job.held.pop(name)
        job.pass_time(5.0)
        assert [job.state.tasks[f"ps:{index}"].state for index in (0, 1)] == ["lost", "live"]


class TestMissingCopies:
    def test_they_are_filled_on_the_servers_that_are_left(self) -> None:
        job = Job()
        job.lose("ps:0")
        job.feed(Tick())
        assert job.view.next_shards and job.view.generation == 1
        job.switch()
        assert (job.view.generation, job.view.next_shards) == (2, ())
        assert not cluster_status(job.now, job.state).whole
        job.fill()
        assert all(len(shard.copies) == 2 for shard in job.view.shards)

    def test_nothing_moves_where_the_server_may_be_started_anew(self) -> None:
        job = Job(wait_for_restart=300.0)
        job.lose("ps:0")
        assert job.settle() == 0
        assert job.placement == [(0, 85, (1,)), (85, 170, (1, 2)), (170, 256, (2,))]
        job.pass_time(REBALANCE_SECONDS)
        assert job.view.next_shards, "it stays away: the others share its slots"
        job.settle()
        assert job.placement == [(0, 128, (1, 2)), (128, 256, (2, 1))]
        assert cluster_status(job.now, job.state).whole

    def test_a_server_that_is_started_anew_gets_its_part_back(self) -> None:
        job = Job(wait_for_restart=300.0)
        job.lose("ps:0")
        job.settle()
        job.come("ps:0")
        assert job.settle() <= 2
        parts = {server: 0 for server in range(3)}
        for start, stop, copies in job.placement:
            assert len(copies) == 2
            parts[copies[0]] += stop - start
        assert sorted(parts.values()) == [85, 85, 86]

    def test_who_reports_for_an_earlier_incarnation_is_not_believed(self) -> None:
        job = Job()
        job.lose("ps:0")
        job.feed(Tick())
        job.switch()
        before = job.view
        shard = next(n for n, each in enumerate(before.shards) if each.joining)
        (server,) = before.shards[shard].joining
        primary = job.held[f"ps:{before.shards[shard].primary}"]
        for late in (
            CaughtUp(1, shard, server, 1),  # an earlier generation
            CaughtUp(2, shard, server, 7),  # another incarnation
            CaughtUp(2, shard, 0, 1),  # a server that is lost
            CaughtUp(2, 99, server, 1),  # no such shard
        ):
            job.say(primary, late)
            assert job.view == before and job.closed == []
        other = job.held[f"ps:{server}"]
        job.say(other, CaughtUp(2, shard, server, 1))
        assert job.view == before, "it is no primary of that shard"
        job.say(primary, CaughtUp(2, shard, server, 1))
        assert server in job.view.shards[shard].backups

    def test_a_backup_that_is_of_no_use_is_filled_again(self) -> None:
        job = Job()
        primary = job.held["ps:0"]
        for late in (CopyLost(2, 0, 1, 1), CopyLost(1, 0, 1, 2), CopyLost(1, 0, 2, 1)):
            job.say(primary, late)
            assert job.placement == FIRST
        for _ in range(2):
            job.say(primary, CopyLost(1, 0, 1, 1))
            assert job.view.shards[0] == ShardEntry(0, 85, 0)
        assert not cluster_status(job.now, job.state).whole
        # The next generation begins with a state from which it can be filled.
        assert job.view.next_shards[0] == ShardEntry(0, 85, 0, (), (1,))

    def test_a_worker_that_reports_a_copy_is_not_heard(self) -> None:
        job = Job()
        before = job.view
        job.say(job.held["worker:0"], CaughtUp(1, 0, 1, 1))
        assert job.view == before


class TestReconfiguration:
    def test_a_newcomer_takes_a_third_of_the_slots_in_two_generations(self) -> None:
        job = Job(servers=2, replicas=1, elastic=True)
        job.come("ps:2")
        assert job.view.next_shards == ()
        job.feed(Tick())
        filled = (
            ShardEntry(0, 85, 0),
            ShardEntry(85, 128, 0, (), (2,)),
            ShardEntry(128, 170, 1, (), (2,)),
            ShardEntry(170, 256, 1),
        )
        assert job.view.next_shards == filled
        job.switch()
        assert job.view.shards == filled and job.view.generation == 2
        job.fill()
        assert all(not shard.joining for shard in job.view.shards)
        job.feed(Tick())
        job.switch()
        assert job.placement == [(0, 85, (0,)), (85, 170, (2,)), (170, 256, (1,))]
        assert job.view.generation == 3 and job.settle() == 0

    def test_it_switches_when_every_shard_is_ready_and_not_before(self) -> None:
        job = Job(servers=2, replicas=1, elastic=True)
        job.come("ps:2")
        job.feed(Tick())
        job.report_ready(0)
        job.report_ready(0)
        assert job.view.generation == 1
        job.report_ready(1)
        assert job.view.generation == 2

    def test_a_worker_may_come_and_go_meanwhile(self) -> None:
        job = Job(servers=2, replicas=1, elastic=True)
        job.come("ps:2")
        job.feed(Tick())
        planned = job.view.next_shards
        job.report_ready(0)
        job.lose("worker:1")
        assert job.view.next_shards == planned
        job.report_ready(1)
        assert job.view.generation == 1, "the view has let shard 0 go on: it must stop once more"
        job.report_ready(0)
        assert job.view.generation == 2

    def test_the_loss_of_a_server_gives_it_up_and_it_is_planned_again(self) -> None:
        job = Job(servers=3, replicas=2, elastic=True)
        job.come("ps:3")
        job.feed(Tick())
        announced = job.view.number
        job.report_ready(0)
        job.lose("ps:3")
        assert (job.view.next_shards, job.view.generation) == ((), 1)
        for number in range(3):  # what they say of the one that was given up
            job.say(job.held[f"ps:{number}"], ReadyToSwitch(announced, 1, number))
        assert job.view.generation == 1
        job.come("ps:3")
        job.feed(Tick())
        for number in range(3):
            job.say(job.held[f"ps:{number}"], ReadyToSwitch(announced, 1, number))
        assert job.view.generation == 1, "that was said of another reconfiguration"
        job.settle()
        assert {copies[0] for _, _, copies in job.placement} == {0, 1, 2, 3}

    def test_one_that_does_not_stop_is_given_up_and_tried_again(self) -> None:
        job = Job(servers=2, replicas=1, elastic=True)
        job.come("ps:2")
        job.feed(Tick())
        job.report_ready(1)
        for _ in range(int(SWITCH_SECONDS / 5)):
            job.pass_time(5.0)
        assert job.view.next_shards == () and job.view.generation == 1
        assert "it waited for shard 0 on ps:0" in job.reason
        job.pass_time(1.0)
        assert job.view.next_shards == ()
        for _ in range(int(SWITCH_SECONDS / 5)):
            job.pass_time(5.0)
        assert job.view.next_shards

    def test_none_is_planned_while_a_server_is_cut_off(self) -> None:
        job = Job(servers=2, replicas=1, elastic=True)
        job.hang_up(job.held["ps:1"])
        job.come("ps:2")
        job.feed(Tick())
        assert job.view.next_shards == ()
        job.held["ps:1"] = job.join("ps:1", incarnation=1)
        job.feed(Tick())
        assert job.view.next_shards

    def test_none_is_planned_when_the_job_is_over(self) -> None:
        job = Job(servers=2, replicas=1, elastic=True)
        job.come("ps:2")
        for worker in (0, 1):
            job.leave(job.held[f"worker:{worker}"], "finished")
        before = job.view
        job.feed(Tick())
        assert job.view == before

    def test_where_nothing_changes_nothing_is_planned(self) -> None:
        job = Job()
        before = job.view
        job.wait(20.0, *job.held.values())
        assert job.view == before

    def test_a_lost_newcomer_without_copies_ends_nothing(self) -> None:
        job = Job(servers=2, replicas=1, elastic=True)
        job.come("ps:2")
        job.lose("ps:2")
        assert job.state.over is None
        assert job.placement == [(0, 128, (0,)), (128, 256, (1,))]


class TestAnotherLife:
    def test_when_all_copies_are_lost_the_servers_that_are_left_begin_anew(self) -> None:
        job = Job(servers=3, replicas=1, survives_loss=True)
        job.lose("ps:1")
        assert job.state.over is None
        assert job.placement == [(0, 128, (0,)), (128, 256, (2,))]
        assert (job.view.life, job.view.generation, job.view.next_shards) == (1, 2, ())
        assert "all copies of the slots 85-169 are lost" in job.reason

    def test_without_a_server_the_job_waits_for_one_that_is_started_anew(self) -> None:
        job = Job(servers=1, replicas=1, survives_loss=True, wait_for_restart=20.0)
        before = job.view
        job.lose("ps:0")
        assert job.view == before and job.state.over is None
        assert cluster_status(job.now, job.state).missing == ("ps:0",)
        job.come("ps:0")
        assert (job.view.life, job.view.generation) == (1, 2)
        assert job.placement == [(0, 256, (0,))]
        assert {m.view.life for _, m in job.sent if isinstance(m, ViewChanged)} == {1}

    def test_but_not_for_ever(self) -> None:
        job = Job(servers=2, replicas=2, survives_loss=True, wait_for_restart=20.0)
        job.lose("ps:0")
        job.hang_up(job.held.pop("ps:1"))
        job.pass_time(30.0)  # it has the last copy
        job.pass_time(19.0)
        assert job.state.over is None
        job.pass_time(1.0)
        over = job.state.over
        assert over is not None and over.outcome == "failed" and over.culprit == "ps:0"
        assert over.reason.startswith("all 2 servers were lost, first ps:0 (pid 7 on h): its conn")

    def test_nor_where_nobody_starts_one(self) -> None:
        job = Job(servers=1, replicas=1, survives_loss=True)
        job.lose("ps:0")
        assert job.state.over is not None and job.state.over.culprit == "ps:0"

    def test_a_job_that_does_not_survive_it_ends(self) -> None:
        job = Job(servers=2, replicas=2)
        job.lose("ps:0")
        job.lose("ps:1")
        assert job.state.over is None, "it has the last copy, and may come back"
        job.pass_time(28.0)
        over = job.state.over
        assert isinstance(over, JobOver) and over.culprit == "ps:1"

    def test_a_server_that_leaves_by_itself_is_replaced_by_its_backup(self) -> None:
        job = Job(servers=2, replicas=2)
        job.leave(job.held["ps:0"], "interrupted", "SIGTERM")
        assert job.state.over is None
        assert job.placement == [(0, 128, (1,)), (128, 256, (1,))]
        job.leave(job.held["ps:1"], "interrupted", "SIGTERM")
        assert job.state.over is not None and job.state.over.outcome == "interrupted"
