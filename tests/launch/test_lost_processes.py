"""The launcher with real processes: servers and a coordinator that are lost; a job that grows."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.launch.programs import LISTEN, alive, run_programs
from trireme.launch.launcher import LostProcess
from trireme.launch.run_directory import JOURNAL
from trireme.launch.supervision_state import SupervisionLimits

pytestmark = pytest.mark.processes

FOR_EVER = "signal.pause()"
DIE = "os.kill(os.getpid(), signal.SIGKILL)"
FIRST = """
mark = HERE + "/" + json.loads(os.environ["TRIREME_TASK"])["role"]
first = not os.path.exists(mark)
open(mark, "w").close()
"""
"""Sets `first` in a task's first process."""


def limits(**other: object) -> SupervisionLimits:
    return SupervisionLimits(
        **{"settle": 0.2, "end": 0.3, "kill": 5.0, "outlives_servers": True} | other
    )


def fifos(directory: Path, *names: str) -> None:
    for name in names:
        os.mkfifo(directory / name)


def assert_nobody_left(ran) -> None:
    assert [pid for pid in ran.record.pids.values() if alive(pid)] == []


def test_a_server_is_started_again_and_the_coordinator_hears_of_the_lost_one(
    tmp_path: Path,
) -> None:
    fifos(tmp_path, "again")
    told: list[tuple[str, tuple[LostProcess, ...]]] = []
    ran = run_programs(
        tmp_path,
        {
            "coordinator:0": f"{LISTEN}; {FOR_EVER}",
            "ps:0": FOR_EVER,
            "ps:1": f"{FIRST}\nif first: print(os.getpid()); {DIE}\n"
            f"open(HERE + '/again', 'w').close(); {FOR_EVER}",
            "worker:0": "open(HERE + '/again').read(); print('done')",
        },
        limits=limits(restarts=1),
        announce=lambda address, lost: told.append((address, tuple(lost))),
    )
    assert ran.status == 0, ran.err
    assert "ps:1 was killed by SIGKILL; started again (1 of 1)" in ran.err
    assert "worker:0 | done" in ran.out
    pid = int(ran.log("ps-1").split()[0])
    lost = LostProcess("ps", 1, socket.gethostname(), pid, "killed by SIGKILL")
    assert told == [("tcp://127.0.0.1:9", (lost,))]
    assert [config.restarts_left for config in ran.commands if config.name == "ps:1"] == [1, 0]
    assert_nobody_left(ran)


def test_the_job_goes_on_without_a_server_that_dies_again_and_again(tmp_path: Path) -> None:
    fifos(tmp_path, "gone")
    # The kernel closes the fifo of the server's last process: only then does the worker end.
    left = "json.loads(os.environ['TRIREME_TASK'])['restarts_left']"
    ran = run_programs(
        tmp_path,
        {
            "coordinator:0": f"{LISTEN}; {FOR_EVER}",
            "ps:0": FOR_EVER,
            "ps:1": f"held = {left} or open(HERE + '/gone', 'w'); {DIE}",
            "worker:0": "open(HERE + '/gone').read(); signal.sigtimedwait([], 0.3)",
        },
        limits=limits(restarts=2),
    )
    assert ran.status == 0, ran.err
    assert "started again (2 of 2)" in ran.err
    assert "ps:1 was killed by SIGKILL; the job goes on with the 1 server left" in ran.err
    assert_nobody_left(ran)


def test_the_coordinator_is_started_again_at_its_address_with_its_journal(tmp_path: Path) -> None:
    fifos(tmp_path, "again")
    told: list[tuple[LostProcess, ...]] = []
    ran = run_programs(
        tmp_path,
        {
            "coordinator:0": f"{LISTEN}; tell('members', joined=True, formed=True)\n{FIRST}\n"
            f"if first: {DIE}\nopen(HERE + '/again', 'w').close(); {FOR_EVER}",
            "ps:0": FOR_EVER,
            "worker:0": "open(HERE + '/again').read(); print('done')",
        },
        limits=limits(coordinator_restarts=1),
        announce=lambda address, lost: told.append(tuple(lost)),
    )
    assert ran.status == 0, ran.err
    assert "coordinator:0 was killed by SIGKILL; started again (1 of 1)" in ran.err
    started = [config for config in ran.commands if config.role == "coordinator"]
    assert [config.listen for config in started] == ["tcp://127.0.0.1:0", "tcp://127.0.0.1:9"]
    assert [config.resumes for config in started] == [False, True]
    assert {config.journal for config in started} == {str(tmp_path.resolve() / JOURNAL)}
    assert [config.name for config in ran.commands].count("ps:0") == 1
    assert told == []
    assert_nobody_left(ran)


def test_a_coordinator_that_comes_back_hears_what_was_lost_meanwhile(tmp_path: Path) -> None:
    fifos(tmp_path, "away", "back", "again")
    told: list[tuple[str, ...]] = []
    # A server dies when there is no coordinator; its next process lets the coordinator listen.
    ran = run_programs(
        tmp_path,
        {
            "coordinator:0": f"{FIRST}\nif first: {LISTEN}; tell('members', joined=True); {DIE}\n"
            f"open(HERE + '/away').read(); open(HERE + '/back').read(); {LISTEN}\n"
            f"tell('members', joined=True, formed=True); open(HERE + '/again', 'w').close()\n"
            f"{FOR_EVER}",
            "ps:0": f"{FIRST}\nif first: open(HERE + '/away', 'w'); {DIE}\n"
            f"open(HERE + '/back', 'w').close(); {FOR_EVER}",
            "worker:0": "open(HERE + '/again').read(); print('done')",
        },
        limits=limits(restarts=1, coordinator_restarts=1),
        announce=lambda address, lost: told.append(tuple(f"{p.role}:{p.index}" for p in lost)),
    )
    assert ran.status == 0, ran.err
    assert told == [("ps:0",), ("ps:0",)]
    assert_nobody_left(ran)


def test_a_job_grows_and_shrinks_as_its_coordinator_says(tmp_path: Path) -> None:
    fifos(tmp_path, "grown", "shrunk", "leave")
    names = "('ps:0', 'ps:1', 'worker:0', 'worker:1')"
    grown = f"tell('members', joined=True, formed=True, wanted={names}, requests=1)"
    less = (
        "tell('members', joined=True, formed=True, wanted=('ps:0', 'worker:0'), "
        "dismissed=('ps:1', 'worker:1'), requests=2)"
    )
    ran = run_programs(
        tmp_path,
        {
            "coordinator:0": f"{LISTEN}; {grown}; open(HERE + '/grown').read(); {less}\n"
            f"open(HERE + '/leave', 'w').close(); open(HERE + '/shrunk', 'w').close(); {FOR_EVER}",
            "ps:0": FOR_EVER,
            "worker:0": "open(HERE + '/shrunk').read(); signal.sigtimedwait([], 0.3); print(1)",
            "ps:1": "print('ps:1 is here'); open(HERE + '/grown', 'w').close()",
            "worker:1": "open(HERE + '/leave').read(); sys.exit('it left in a hurry')",
        },
        limits=limits(),
        later=("ps:1", "worker:1"),
    )
    assert ran.status == 0, ran.err
    assert "ps:1 is started: the job was made larger" in ran.err
    assert "ps:1 | ps:1 is here" in ran.out
    assert set(ran.record.pids) == {"coordinator:0", "ps:0", "ps:1", "worker:0", "worker:1"}
    assert_nobody_left(ran)
