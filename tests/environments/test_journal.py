"""The journal keeps what the coordinator has decided, whenever its process dies."""

from __future__ import annotations

import os
import random
import resource
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tests.cluster.driver import Driver, Job
from trireme.cluster.coordinator import Coordinator, resumed
from trireme.cluster.messages import Joined, ViewChanged
from trireme.cluster.state import Policy, State
from trireme.cluster.view import first_view
from trireme.environments.journal import FileJournal
from trireme.errors import ClusterError, ConfigurationError
from trireme.launch.exit_reason import describe


def again(job: Driver, now: float = 5.0) -> None:
    """Another coordinator takes the job over, on another clock."""
    job.now = now
    job.state = resumed(now, msgspec.msgpack.decode(msgspec.msgpack.encode(job.state), type=State))


def test_what_was_written_is_there_again(tmp_path: Path) -> None:
    job, path = Job(), tmp_path / "journal"
    with closing(FileJournal(path)) as journal:
        assert journal.state is None
        for state in (Job(servers=1, replicas=1).state, job.state):
            journal.write(state)
    with closing(FileJournal(path)) as journal:
        assert journal.state == job.state
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_coordinator_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(FileJournal(path)), pytest.raises(ConfigurationError, match="another process"):
        FileJournal(path)


@pytest.mark.parametrize("content", [b"no journal, but long enough " * 200, b"trireme journal 4\n"])
def test_what_is_no_journal_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="no journal of a coordinator, or damaged"):
        FileJournal(path)
    assert path.read_bytes() == content


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"trireme journal 3\n" + bytes(64))
    with pytest.raises(ConfigurationError, match="of another version"):
        FileJournal(path)


def test_each_changed_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    path, damaged, state = tmp_path / "journal", tmp_path / "damaged", Job().state
    with closing(FileJournal(path)) as journal:
        journal.write(state)
    whole = path.read_bytes()
    bits, found = random.Random(1), 0
    for _ in range(100):
        content, bit = bytearray(whole), bits.randrange(8 * len(whole))
        content[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(content)
        try:
            with closing(FileJournal(damaged)) as journal:
                assert journal.state == state
        except ConfigurationError:
            found += 1
    assert found > 3


@pytest.mark.parametrize("size", [0, 10, 40, 300])
def test_a_journal_that_was_cut_or_removed_is_refused(tmp_path: Path, size: int) -> None:
    """Else the job would begin anew, and all its tasks would be of an earlier start."""
    path = tmp_path / "journal"
    with closing(FileJournal(path)) as journal:
        journal.write(Job().state)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigurationError, match="damaged"):
        FileJournal(path)


def test_a_full_disk_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    """A launcher starts the coordinator again: there may be room by then."""
    state = Job().state
    with closing(FileJournal(tmp_path / "journal")) as journal:
        journal.write(state)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            with pytest.raises(ClusterError, match="the space on the disk") as raised:
                journal.write(replace(state, term=9))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert describe(raised.value).worth_a_restart
    with closing(FileJournal(tmp_path / "journal")) as journal:
        assert journal.state == state


def test_a_place_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be used"):
        FileJournal(tmp_path / "nowhere" / "journal")


KILLED = """
import os, sys
from pathlib import Path
from tests.cluster.driver import Job
from trireme.environments.journal import FileJournal
journal, job = FileJournal(Path(sys.argv[1])), Job()
journal.write(job.state)
os.kill(os.getpid(), 9)
"""


@pytest.mark.processes
def test_what_is_written_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], env={**os.environ})
    assert ended.returncode == -9
    with closing(FileJournal(path)) as journal:
        assert journal.state is not None and journal.state.view is not None


def test_a_coordinator_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    policy = Policy(workers=1, servers=0)
    with closing(FileJournal(tmp_path / "journal")) as journal:
        first = Coordinator(policy, journal=journal)
    with closing(FileJournal(tmp_path / "journal")) as journal:
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
    assert first_view(2) <= job.view.number < first_view(3)


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


def test_what_tasks_report_of_themselves_is_not_written(tmp_path: Path) -> None:
    """It is two thirds of a state, and each task reports it again within a second."""
    job, path = Job(), tmp_path / "journal"
    tasks = {n: replace(t, status={"time/wait": 1.5}) for n, t in job.state.tasks.items()}
    with closing(FileJournal(path)) as journal:
        journal.write(replace(job.state, tasks=tasks))
    assert b"time/wait" not in path.read_bytes()
    with closing(FileJournal(path)) as journal:
        assert journal.state == job.state
