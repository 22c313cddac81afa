"""The journal keeps what the coordinator has decided, whenever its process dies."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.cluster.driver import Driver, Job
from trireme.cluster.coordinator import Coordinator
from trireme.cluster.journal import Journal, resumed
from trireme.cluster.messages import Joined, ViewChanged
from trireme.cluster.state import Policy, State
from trireme.cluster.view import first_view, term_of
from trireme.errors import ConfigurationError


def again(job: Driver, now: float = 5.0) -> None:
    """Another coordinator takes the job over, on another clock."""
    job.now = now
    job.state = resumed(now, msgspec.msgpack.decode(msgspec.msgpack.encode(job.state), type=State))


def test_what_was_written_is_there_again(tmp_path: Path) -> None:
    job, path = Job(), tmp_path / "journal"
    with Journal(path) as journal:
        assert journal.state is None
        for state in (Job(servers=1, replicas=1).state, job.state):
            journal.write(state)
    with Journal(path) as journal:
        assert journal.state == job.state
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with Journal(path, resumes=False) as journal:
        assert journal.state is None


def test_a_second_coordinator_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal"), pytest.raises(ConfigurationError, match="another process"):
        Journal(tmp_path / "journal")


@pytest.mark.parametrize("content", [b"no database, but long enough " * 200, b"SQLite format 3\0x"])
def test_what_is_no_journal_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="no journal of a coordinator, or damaged"):
        Journal(path)
    assert path.read_bytes() == content


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE mine (x)")
    with pytest.raises(ConfigurationError, match="of another program"):
        Journal(path)


def test_a_state_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path).close()
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO state VALUES (1, ?)", (b"\xc1",))
    database.close()
    with pytest.raises(ConfigurationError, match="is damaged"):
        Journal(path)


def test_a_place_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be used"):
        Journal(tmp_path / "nowhere" / "journal")


KILLED = """
import os, sys
from pathlib import Path
from tests.cluster.driver import Job
from trireme.cluster.journal import Journal
journal, job = Journal(Path(sys.argv[1])), Job()
journal.write(job.state)
os.kill(os.getpid(), 9)
"""


@pytest.mark.processes
def test_what_is_written_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], env={**os.environ})
    assert ended.returncode == -9
    with Journal(path) as journal:
        assert journal.state is not None and journal.state.view is not None


def test_a_coordinator_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    policy = Policy(workers=1, servers=0)
    with Journal(tmp_path / "journal") as journal:
        first = Coordinator(policy, journal=journal)
    with Journal(tmp_path / "journal") as journal:
        second = Coordinator(policy, journal=journal)
    assert second.state.epoch == first.state.epoch
    assert (first.state.term, second.state.term) == (1, 2)


def test_tasks_come_back_as_what_they_were_and_the_view_stays(tmp_path: Path) -> None:
    job = Job()
    before, held = job.view, dict(job.held)
    again(job)
    for name in held:
        connection = job.join(name, 1, term=1)
        (joined,) = (m for m in job.to(connection) if isinstance(m, Joined))
        assert (joined.incarnation, joined.term) == (1, 2)
        assert ViewChanged(before) in job.to(connection)
    job.wait(60.0, *(job.state.tasks[name].connection or 0 for name in held))
    assert job.view == before, "nothing has changed"


def test_a_task_that_stays_away_is_lost_after_its_deadline() -> None:
    job = Job()
    again(job)
    held = [job.join(name, 1, term=1) for name in job.held if name != "ps:1"]
    job.wait(job.state.policy.heartbeat_timeout - 1.0, *held)
    assert len(job.view.servers) == 3
    job.wait(2.0, *held)
    assert [server.index for server in job.view.servers] == [0, 2]
    assert job.view.number >= first_view(2)
    assert term_of(job.view.number) == 2


def test_a_reconfiguration_goes_on() -> None:
    job = Job(servers=2, replicas=1, elastic=True)
    job.come("ps:2")
    job.settle_once()
    assert job.view.next_shards
    job.report_ready(0)
    again(job)
    job.held = {name: job.join(name, 1, term=1) for name in job.held}
    assert job.view.next_shards
    job.report_ready(1)
    assert job.view.generation == 2
    job.settle()
    assert {shard.primary for shard in job.view.shards} == {0, 1, 2}


def test_the_end_of_a_job_is_told_to_those_who_had_not_heard_of_it() -> None:
    job = Job(servers=1, replicas=1)
    job.leave(job.held["worker:0"], "finished")
    job.leave(job.held["worker:1"], "finished")
    assert job.state.over is not None
    again(job)
    connection = job.join("ps:0", 1, term=1)
    assert job.state.over in job.to(connection)
