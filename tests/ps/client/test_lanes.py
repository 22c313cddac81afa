"""For how long a worker tries to reach a server, and what it says meanwhile."""

from __future__ import annotations

import pytest

from trireme.cluster.view import ServerEntry, ShardEntry, View, WorkerEntry
from trireme.errors import (
    ConnectionRefused,
    ConnectTimeout,
    Fenced,
    NetworkLost,
    WireError,
    WireTimeout,
)
from trireme.ps.client.lanes import ClientOptions, Lanes, Request
from trireme.ps.messages import Pull, Status, Stopping, Waiting

SILENCE = ConnectTimeout("no answer in time")
REFUSAL = ConnectionRefused("nothing listens there")


def view(number: int, *workers: int) -> View:
    servers = (ServerEntry(0, 1, "tcp://a"), ServerEntry(1, 1, "tcp://b"))
    return View(number, servers, tuple(WorkerEntry(worker, 1) for worker in workers))


class Trial:
    """A worker that asks servers, and every half second meets an error at one."""

    def __init__(self, *, hurries: bool = False, reaches_coordinator: bool = True) -> None:
        self.view = view(1, 0, 3)
        self.notices: list[Waiting] = []
        self.now = 0.0
        self.reaches_coordinator = reaches_coordinator
        options = ClientOptions(
            "job",
            b"",
            3,
            1,
            patience_seconds=50.0,
            waiting=lambda *notice: self.notices.append(Waiting(*notice)),
            hurries=lambda: hurries,
            reaches_coordinator=lambda: self.reaches_coordinator,
        )
        self.lanes = Lanes(options, 2, lambda: self.view)
        self.lanes.ask(0.0, {0: Request(Status())})

    def meets(self, error: WireError, until: float) -> None:
        while self.now < until:
            self.now += 0.5
            self.lanes.broke(self.now, 0, error)
            self.lanes.tick(self.now)


@pytest.mark.parametrize(
    "error", [SILENCE, WireTimeout("no proof in time"), NetworkLost("timed out")]
)
def test_a_worker_that_is_cut_off_tries_for_as_long_as_it_may_come_back(error: WireError) -> None:
    trial = Trial()
    trial.meets(error, 600.0)
    assert trial.lanes.waiting, "it gave up"
    with pytest.raises(type(error), match="worker:3 could not reach ps:0 for 600 s") as lost:
        trial.meets(error, 602.0)
    assert lost.value.server == "", "its silence says nothing about the server"


def test_an_answer_after_the_silence_is_that_to_the_first_request() -> None:
    trial = Trial()
    trial.meets(SILENCE, 75.0)
    (again,) = trial.lanes.tick(trial.now + 1.0)
    assert again.sequence == 1
    trial.lanes.heard(trial.now + 1.0, 0, 1, Stopping(7), ())
    assert trial.lanes.answers[0][0] == Stopping(7)


def test_a_server_whose_host_refuses_for_long_is_lost() -> None:
    trial = Trial()
    trial.meets(REFUSAL, 30.0)
    with pytest.raises(ConnectionRefused, match="could not reach ps:0 for 30 s") as lost:
        trial.meets(REFUSAL, 32.0)
    assert lost.value.server == "ps:0"


def test_without_its_coordinator_a_worker_waits_for_a_server_that_refuses() -> None:
    """Where both were one process, the next one takes as long as it takes to start."""
    trial = Trial(reaches_coordinator=False)
    trial.meets(REFUSAL, 500.0)
    assert trial.lanes.waiting, "it gave up"
    trial.reaches_coordinator = True
    trial.meets(REFUSAL, 530.0)
    with pytest.raises(ConnectionRefused, match="worker:3 could not reach ps:0 for 30 s"):
        trial.meets(REFUSAL, 532.0)


def test_refusals_count_from_the_last_silence_on() -> None:
    """A server may refuse a worker that comes back until it has heard of it."""
    trial = Trial()
    trial.meets(SILENCE, 45.0)
    trial.meets(REFUSAL, 75.0)
    with pytest.raises(ConnectionRefused, match="for 30 s"):
        trial.meets(REFUSAL, 77.0)


def test_a_worker_that_is_asked_to_stop_does_not_wait_for_its_network() -> None:
    trial = Trial(hurries=True)
    with pytest.raises(ConnectTimeout, match="could not reach ps:0 for 3 s"):
        trial.meets(SILENCE, 5.0)


def test_it_says_every_five_seconds_whom_it_cannot_reach_and_for_how_long_it_tries() -> None:
    trial = Trial()
    trial.meets(SILENCE, 21.0)
    assert [notice.names for notice in trial.notices] == [("ps:0",)] * 4
    assert [round(notice.seconds) for notice in trial.notices] == [5, 10, 15, 20]
    assert "out of reach" in trial.notices[0].reason
    assert "tried for 595 s more" in trial.notices[0].reason


def test_it_knows_which_servers_have_been_silent_since_when_until_one_answers() -> None:
    trial = Trial()
    trial.meets(REFUSAL, 3.0)
    assert trial.lanes.silent is None
    trial.meets(SILENCE, 30.0)
    assert trial.lanes.silent == (0.5, "ps:0")
    trial.lanes.heard(31.0, 0, 1, Stopping(7), ())
    assert trial.lanes.silent is None


def test_a_pull_that_is_sent_again_to_a_job_with_another_chief_is_fenced_off() -> None:
    """The refusal of a pull that waited for the first values is lost with its connection."""
    trial = Trial()
    trial.lanes.ask(0.0, {0: Request(Pull(0))}, again=False)
    trial.view = view(2, 0, 1, 3)
    trial.lanes.broke(1.0, 0, SILENCE)
    (again,) = trial.lanes.tick(2.0)
    assert again.message == Pull(2), "the chief has not changed"
    trial.view = view(3, 1, 3)
    trial.lanes.broke(3.0, 0, SILENCE)
    with pytest.raises(Fenced, match="another worker is chief now"):
        trial.lanes.tick(4.0)
    assert not trial.lanes.waiting


def test_a_connection_may_break_to_a_shard_that_the_newest_view_has_no_more() -> None:
    trial = Trial()
    trial.lanes.ask(0.0, {1: Request(Status())})
    trial.view = View(2, trial.view.servers, trial.view.workers, (ShardEntry(0, 1, 0),), 2)
    trial.lanes.broke(1.0, 1, SILENCE)
    assert trial.lanes.task(1) == "ps:1"
