from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import psutil
import pytest

from tests.cluster.harness import (
    JOB,
    PATIENCE,
    SECRET,
    ByHand,
    Host,
    LogEvent,
    Watched,
    new_address,
)
from trireme.cluster.coordinator import Coordinator
from trireme.cluster.member import Observer
from trireme.cluster.messages import MAX_LINE, JobOver, Leave
from trireme.cluster.state import Policy
from trireme.cluster.view import ServerEntry, View, WorkerEntry
from trireme.errors import (
    AuthenticationError,
    ClusterError,
    ConfigurationError,
    ConnectTimeout,
    FrameError,
    JobFailed,
    TaskClaimedError,
    WaitTimeout,
)
from trireme.wire.service import Service
from trireme.wire.transport import Stream, listen


@pytest.fixture(params=["memory", "tcp"])
def address(request: pytest.FixtureRequest) -> str:
    return new_address(str(request.param))


@pytest.fixture
def host(address: str) -> Iterator[Host]:
    with Host(address) as host:
        yield host


@pytest.fixture
def pair(host: Host) -> Iterator[tuple[Watched, Watched]]:
    """Both workers of a running job, the first view taken from their news."""
    with host.member("worker:0") as first, host.member("worker:1") as second:
        first.join()
        second.join()
        assert first.next_view() == second.next_view()
        yield first, second


class TestJoining:
    def test_all_come_together(self, address: str) -> None:
        with Host(address, servers=1) as host:
            members = [host.member(name) for name in ("worker:1", "ps:0", "worker:0")]
            assert [member.join() for member in members] == [1, 1, 1]
            views = [member.wait_for_view(timeout=PATIENCE) for member in members]
            assert views[0] == views[1] == views[2] == members[0].view
            assert views[0].servers == (ServerEntry(0, 1, "tcp://127.0.0.1:9"),)
            assert views[0].workers == (WorkerEntry(0, 1), WorkerEntry(1, 1))
            for member in members:
                member.close()

    def test_the_coordinator_may_start_later(self, address: str) -> None:
        with Watched(address, "worker:0") as member:
            joined: list[int] = []
            thread = threading.Thread(target=lambda: joined.append(member.join()))
            thread.start()
            with Host(address, workers=1):
                thread.join(PATIENCE)
                assert joined == [1]
                assert member.next_view().number == 1

    def test_a_coordinator_that_never_starts_is_named(
        self, address: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with (
            Watched(address, "worker:0", connect_timeout=0.2) as member,
            pytest.raises(ConnectTimeout, match=f"worker:0 could not reach .*{address}"),
            caplog.at_level("INFO", logger="trireme.cluster"),
        ):
            member.join()
        assert "lost its coordinator" not in caplog.text, "it never had one"

    def test_who_has_closed_does_not_wait_to_join(self, address: str) -> None:
        member = Watched(address, "worker:0")
        member.close()
        began = time.monotonic()
        with pytest.raises(ClusterError, match="no longer a member"):
            member.join(timeout=PATIENCE)
        assert time.monotonic() - began < PATIENCE / 2

    def test_it_says_so_while_it_tries(self, address: str) -> None:
        with (
            Watched(address, "worker:0", connect_timeout=1.0, notice_interval=0.05) as member,
            LogEvent("worker:0 waits for the coordinator", times=3) as logged,
        ):
            with pytest.raises(ConnectTimeout):
                member.join()
            logged.wait()

    def test_a_listener_that_never_answers_is_named(self, address: str) -> None:
        listener = listen(address)
        with (
            Watched(address, "worker:0", connect_timeout=0.2) as member,
            pytest.raises(ConnectTimeout, match="handshake"),
        ):
            member.join()
        listener.close()

    def test_the_callers_deadline_counts_too(self, address: str) -> None:
        with Watched(address, "worker:0") as member, pytest.raises(WaitTimeout, match=address):
            member.join(timeout=0.1)

    def test_another_secret_is_refused_at_once(self, host: Host) -> None:
        with host.member("worker:0", secret=b"x") as member, pytest.raises(AuthenticationError):
            member.join()

    def test_another_job_is_refused_at_once(self, host: Host) -> None:
        with host.member("worker:0", job="job-2") as member, pytest.raises(AuthenticationError):
            member.join()

    def test_an_address_without_sense_is_refused_at_once(self) -> None:
        with Watched("nowhere", "worker:0") as member, pytest.raises(ConfigurationError):
            member.join()

    def test_a_task_outside_the_cluster(self, host: Host) -> None:
        with (
            host.member("worker:2") as member,
            pytest.raises(ConfigurationError, match=r"worker:2 is outside .* 2 tasks"),
        ):
            member.join()

    def test_a_task_that_another_holds(self, host: Host) -> None:
        with host.member("worker:0") as first, host.member("worker:0") as second:
            first.join()
            with pytest.raises(TaskClaimedError, match=f"pid {psutil.Process().pid} on "):
                second.join()
            assert first.over is None

    def test_a_job_that_is_over(self, host: Host) -> None:
        with ByHand(host.address, "worker:0") as peer:
            peer.join("worker:0")
            peer.say(Leave("failed", "boom"))
            peer.hear(JobOver)
            with host.member("worker:1") as late, pytest.raises(JobFailed, match="boom"):
                late.join()

    def test_a_process_may_host_the_coordinator_it_joins(self, address: str) -> None:
        coordinator = Coordinator(Policy(workers=1, servers=1))
        service = Service(
            listen(address), [coordinator], job=JOB, secret=SECRET, epoch=coordinator.state.epoch
        )
        with Watched(service.address, "ps:0") as server, Watched(address, "worker:0") as worker:
            server.subscribe(lambda news: service.call_soon(service.stop))
            server.start()
            worker.start()
            service.run()
            assert server.next_view() == worker.next_view() == coordinator.state.view
            assert server.join() == worker.join() == 1

    def test_who_does_not_wait_is_told_of_a_failure_too(self, host: Host) -> None:
        with host.member("worker:2") as member:
            member.start()
            over = member.end()
            assert (over.outcome, over.culprit) == ("failed", "worker:2")
            assert "outside" in over.reason
            with pytest.raises(ConfigurationError, match="outside"):
                member.join()
            assert not member.leave("failed")

    def test_something_else_listens_there(self) -> None:
        listener = listen("tcp://127.0.0.1:0")

        def greet() -> None:
            select.select([listener], [], [], PATIENCE)
            stream = listener.accept()
            assert stream is not None
            stream.write([b"HTTP/1.1 400 Bad Request\r\n\r\nwhat was that?"])
            streams.append(stream)

        streams: list[Stream] = []
        thread = threading.Thread(target=greet)
        thread.start()
        with Watched(listener.address, "worker:0") as member, pytest.raises(FrameError):
            member.join()
        thread.join(PATIENCE)
        listener.close()
        streams[0].close()


class TestViews:
    def test_waiting_says_for_whom(self, host: Host) -> None:
        calls: list[tuple[Sequence[str], float]] = []
        enough = threading.Event()

        def on_waiting(names: Sequence[str], seconds: float) -> None:
            calls.append((tuple(names), seconds))
            if len(calls) == 3:
                enough.set()

        with host.member("worker:0") as first, host.member("worker:1") as second:
            first.join()
            other = threading.Thread(target=lambda: (enough.wait(PATIENCE), second.join()))
            other.start()
            view = first.wait_for_view(timeout=PATIENCE, on_waiting=on_waiting)
            other.join(PATIENCE)
        assert view.number == 1
        assert {names for names, _ in calls} == {("worker:1",)}
        assert all(0 < seconds <= 60 for _, seconds in calls)

    def test_a_wait_ends_and_names_the_missing(self, host: Host) -> None:
        with host.member("worker:0") as member:
            member.join()
            with pytest.raises(WaitTimeout, match=r"no view .*came within 0.5 s.* worker:1"):
                member.wait_for_view(timeout=0.5)

    def test_a_process_that_vanishes_is_left_out_and_may_return(
        self, host: Host, pair: tuple[Watched, Watched]
    ) -> None:
        first, second = pair
        second.close()
        assert first.next_view().workers == (WorkerEntry(0, 1),)
        with host.member("worker:1") as again:
            assert again.join() == 2
            assert first.next_view() == again.next_view() == first.view
            assert again.view is not None and again.view.workers[1] == WorkerEntry(1, 2)

    def test_a_wait_ends_with_the_job(self, address: str) -> None:
        with Host(address, join_timeout=0.5) as host, host.member("worker:0") as member:
            member.join()
            with pytest.raises(JobFailed, match=r"worker:1"):
                member.wait_for_view(timeout=PATIENCE)

    def test_after_closing_there_is_nothing_to_wait_for(
        self, pair: tuple[Watched, Watched]
    ) -> None:
        pair[0].close()
        with pytest.raises(ClusterError, match="no longer a member"):
            pair[0].wait_for_view(timeout=PATIENCE)


class TestStatus:
    def test_reports_reach_the_coordinator(self, host: Host, pair: tuple[Watched, Watched]) -> None:
        first, _ = pair
        first.report({"step": 1, "phase": "training"})
        first.report({"step": 2, "loss": 0.5})
        expected = {"step": 2, "phase": "training", "loss": 0.5}
        deadline = time.monotonic() + PATIENCE
        while (status := Observer(host.address, JOB, SECRET).query_status()).tasks[
            0
        ].status != expected:
            assert time.monotonic() < deadline, status
        assert status.tasks[0].pid == psutil.Process().pid
        assert 0 <= status.tasks[0].quiet_seconds < PATIENCE
        assert (status.phase, status.view, status.missing) == ("running", 1, ())

    def test_numbers_of_every_kind_can_be_reported(
        self, host: Host, pair: tuple[Watched, Watched]
    ) -> None:
        first, _ = pair
        first.report({"a": np.float32(0.5), "b": np.int64(3), "c": True, "d": np.str_("x")})
        with pytest.raises(TypeError, match="'e' is a list"):
            first.report({"e": [1]})  # type: ignore[dict-item]
        deadline = time.monotonic() + PATIENCE
        while not (status := Observer(host.address, JOB, SECRET).query_status().tasks[0].status):
            assert time.monotonic() < deadline
        assert status == {"a": 0.5, "b": 3, "c": 1, "d": "x"}
        assert first.over is None

    def test_the_thread_costs_next_to_nothing(self, address: str) -> None:
        with (
            Host(address, workers=1, heartbeat_interval=1.0) as host,
            host.member("worker:0") as member,
        ):
            member.join()
            [thread] = [each for each in threading.enumerate() if "worker:0" in each.name]
            before = cpu_seconds(thread)
            end = time.monotonic() + 0.5
            reports = 0
            while time.monotonic() < end:
                reports += 1
                member.report({"step": reports})
            assert cpu_seconds(thread) - before < 0.1
            assert reports > 10_000


class TestLeaving:
    def test_the_last_one_ends_the_job(self, host: Host, pair: tuple[Watched, Watched]) -> None:
        first, second = pair
        assert first.leave("finished")
        assert first.over is None
        with LogEvent("worker:0 knows that the job is over") as logged:
            assert second.leave("finished")
            logged.wait()
        assert second.end() == first.end() == JobOver("finished", "", "every worker has finished")
        assert host.done.wait(PATIENCE)

    def test_leaving_again_changes_nothing(self, pair: tuple[Watched, Watched]) -> None:
        assert pair[0].leave("finished")
        assert pair[0].leave("failed", "late")
        assert pair[1].over is None

    def test_a_failure_reaches_everybody_once(
        self, host: Host, pair: tuple[Watched, Watched]
    ) -> None:
        first, second = pair
        assert second.leave("failed", "ValueError: \udcff" + "x" * (2 * MAX_LINE))
        over = first.end()
        assert over == second.end() == first.over == host.coordinator.state.over
        assert (over.outcome, over.culprit) == ("failed", "worker:1")
        assert over.reason.endswith("ValueError: ?" + "x" * (MAX_LINE - 13))
        assert first.leave("failed", "because of the other")
        assert host.done.wait(PATIENCE)
        assert host.coordinator.state.over == over

    def test_before_joining_there_is_nothing_to_leave(self, address: str) -> None:
        with Watched(address, "worker:0") as member:
            assert not member.leave("finished", timeout=PATIENCE)

    def test_it_does_not_hang_when_the_coordinator_is_gone(
        self, host: Host, pair: tuple[Watched, Watched]
    ) -> None:
        host.stop()
        start = time.monotonic()
        assert not pair[0].leave("finished", timeout=0.2)
        assert 0.2 <= time.monotonic() - start < PATIENCE

    def test_it_does_not_hang_when_the_coordinator_hangs(
        self, host: Host, pair: tuple[Watched, Watched]
    ) -> None:
        with host.hanging():
            assert not pair[0].leave("finished", timeout=0.2)

    def test_it_survives_a_cut(self, host: Host, pair: tuple[Watched, Watched]) -> None:
        first, second = pair
        with host.hanging(then=host.onlooker.links["worker:0"].close):
            assert not first.leave("finished", timeout=0.2)
        assert first.leave("finished", timeout=PATIENCE)
        assert second.next_view().workers == (WorkerEntry(1, 1),)

    def test_closing_ends_the_thread(self, host: Host) -> None:
        member = host.member("worker:0")
        member.join()
        member.close()
        member.close()
        assert not [each for each in threading.enumerate() if "member-worker:0" in each.name]


class TestReconnecting:
    def test_a_cut_is_mended(self, host: Host, pair: tuple[Watched, Watched]) -> None:
        first, second = pair
        for _ in range(3):
            with LogEvent("worker:0 is connected to its coordinator again") as logged:
                host.cut("worker:0")
                logged.wait()
        assert first.incarnation == 1
        assert first.view == second.view == host.coordinator.state.view
        assert first.view is not None and first.view.number == 1
        assert second.leave("finished")
        assert first.next_view().number == 2  # the first was not told again

    def test_who_is_stuck_does_not_join_again_before_it_goes_on(
        self, host: Host, pair: tuple[Watched, Watched]
    ) -> None:
        _, member = pair
        asked, stuck = threading.Event(), [True]

        def able() -> bool:
            asked.set()
            return not stuck[0]

        member.able = able
        host.cut("worker:1")
        assert asked.wait(PATIENCE)
        asked.clear()
        assert asked.wait(PATIENCE)  # it asks again and again
        assert host.coordinator.state.tasks["worker:1"].state != "live"
        stuck[0] = False
        assert member.wait_until_back(timeout=PATIENCE) >= 1

    def test_the_end_reaches_those_who_are_cut_off(
        self, host: Host, pair: tuple[Watched, Watched]
    ) -> None:
        first, second = pair
        host.service.call_soon(host.onlooker.links["worker:0"].close)
        second.leave("failed", "boom")
        assert "boom" in first.end().reason
        assert host.done.wait(PATIENCE)

    def test_a_coordinator_that_hangs_is_noticed(self, address: str) -> None:
        with (
            Host(address, workers=1, heartbeat_timeout=0.3, wait_for_restart=60.0) as host,
            host.member("worker:0") as member,
        ):
            member.join()
            with LogEvent("worker:0 lost its coordinator") as logged, host.hanging():
                logged.wait()
                assert member.over is None
            assert member.leave("finished", timeout=PATIENCE)
            assert member.end().outcome == "finished"

    def test_who_was_given_up_goes_on_as_a_new_incarnation(
        self, host: Host, pair: tuple[Watched, Watched]
    ) -> None:
        first, second = pair
        gone = threading.Event()
        back = threading.Event()
        second.subscribe(lambda news: (gone.set(), back.wait(PATIENCE)))  # the thread hangs
        with ByHand(host.address, "worker:0") as thief:
            # A new process takes worker:0, and its first view makes worker:1 hang.
            with LogEvent("worker:0", "is cut off") as logged:
                first.close()
                logged.wait()
            thief.join("worker:0")
            assert gone.wait(PATIENCE)
            with LogEvent("worker:1", "was lost") as logged:
                host.cut("worker:1")
                logged.wait()
            back.set()
            assert second.next_view().workers == (WorkerEntry(0, 2), WorkerEntry(1, 1))
            while (view := second.next_view()).workers[-1] != WorkerEntry(1, 2):
                assert view.number < 10
            assert second.incarnation == 2
            assert second.wait_until_back(timeout=PATIENCE) == 2

    def test_who_is_not_let_in_again_says_so(self, host: Host) -> None:
        with host.member("worker:0") as alone:
            alone.join()
            with pytest.raises(WaitTimeout, match=r"worker:0 was taken for lost, .* within 0 s"):
                alone.wait_until_back(timeout=0.0)

    def test_who_was_replaced_meanwhile_gives_up(
        self, host: Host, pair: tuple[Watched, Watched]
    ) -> None:
        _, second = pair
        asleep, awake = threading.Event(), threading.Event()
        second.subscribe(lambda news: (asleep.set(), awake.wait(PATIENCE)))
        pair[0].leave("finished")
        assert asleep.wait(PATIENCE)
        with LogEvent("worker:1", "is cut off") as logged:
            host.cut("worker:1")
            logged.wait()
        with ByHand(host.address, "worker:1") as other:
            assert other.join("worker:1") == 2
            awake.set()
            over = second.end()
        assert (over.outcome, over.culprit) == ("failed", "worker:1")
        assert "incarnation 2" in over.reason


class TestCoordinatorGone:
    def test_the_task_goes_on_for_as_long_as_the_policy_says(self, address: str) -> None:
        with (
            Host(address, rejoin_timeout=1.0) as host,
            host.member("worker:0") as first,
            host.member("worker:1") as second,
        ):
            first.join()
            second.join()
            view, _ = first.next_view(), second.next_view()
            start = time.monotonic()
            host.stop()
            assert (first.over, second.over) == (None, None)
            assert first.view == second.view == view
            over = first.end()
            assert time.monotonic() - start >= 1.0
            assert (over.outcome, over.culprit) == ("failed", "coordinator:0")
            assert host.address in over.reason
            assert not first.leave("failed", "so be it")

    def test_it_says_so_every_few_seconds(self, host: Host) -> None:
        with host.member("worker:0", notice_interval=0.05) as member:
            member.join()
            with LogEvent("training goes on", times=3) as logged:
                host.stop()
                logged.wait()
            assert member.over is None

    def test_one_without_memory_of_the_job_cannot_take_over(
        self, address: str, pair: tuple[Watched, Watched], host: Host
    ) -> None:
        host.stop()
        with Host(address):
            over = pair[0].end()
        assert (over.outcome, over.culprit) == ("failed", "worker:0")
        assert "worker:0 belongs to an earlier start of job job-1" in over.reason

    def test_each_start_of_the_job_has_an_epoch_of_its_own(self, address: str) -> None:
        epochs = []
        for _ in range(2):
            with Host(address) as host, host.member("worker:0") as member:
                assert member.epoch == ""
                member.join()
                assert member.epoch == host.coordinator.state.epoch
                epochs.append(member.epoch)
        assert epochs[0] != epochs[1]

    def test_a_coordinator_that_was_replaced_is_not_believed(
        self, pair: tuple[Watched, Watched], host: Host
    ) -> None:
        member = pair[0]
        member.term = 2  # as if a later start of the coordinator had taken it in
        with LogEvent("worker:0 has joined term 2 of the coordinator") as heard:
            host.cut("worker:0")
            heard.wait()
        assert member.over is None

    def test_a_stranger_on_its_port_is_not_believed(self, address: str) -> None:
        with Host(address, rejoin_timeout=0.5) as host, host.member("worker:0") as member:
            member.join()
            host.stop()
            listener = listen(host.address)
            assert member.end().culprit == "coordinator:0"
            listener.close()


class TestSubscribers:
    def test_one_that_raises_ends_the_membership_aloud(
        self, host: Host, pair: tuple[Watched, Watched]
    ) -> None:
        first, second = pair

        def subscriber(news: View | JobOver) -> None:
            if isinstance(news, View):
                raise RuntimeError("a bug")

        first.subscribe(subscriber)
        with LogEvent("the membership of worker:0 ends by an internal error") as logged:
            second.leave("finished")
            logged.wait()
        over = first.end()
        assert over == first.over
        assert over.culprit == "worker:0" and "a bug" in over.reason


def cpu_seconds(thread: threading.Thread) -> float:
    for each in psutil.Process().threads():
        if each.id == thread.native_id:
            return float(each.user_time + each.system_time)
    raise AssertionError(f"{thread.name} has ended")
