"""The launcher with real processes: servers that are lost; a job that grows."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.launch.programs import FakeCoordinator, alive, run_programs
from trireme.launch.launcher import Membership
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
    ran = run_programs(
        tmp_path,
        {
            "ps:0": FOR_EVER,
            "ps:1": f"{FIRST}\nif first: print(os.getpid()); {DIE}\n"
            f"open(HERE + '/again', 'w').close(); {FOR_EVER}",
            "worker:0": "open(HERE + '/again').read(); print('done')",
        },
        limits=limits(restarts=1),
    )
    assert ran.status == 0, ran.err
    assert "ps:1 was killed by SIGKILL; started again (1 of 1)" in ran.err
    assert "worker:0 | done" in ran.out
    pid = int(ran.log("ps-1").split()[0])
    (coordinator,) = ran.coordinators
    assert coordinator.ended == [("ps:1", socket.gethostname(), pid, "killed by SIGKILL")]
    assert [config.restarts_left for config in ran.commands if config.name == "ps:1"] == [1, 0]
    assert_nobody_left(ran)


def test_the_job_goes_on_without_a_server_that_dies_again_and_again(tmp_path: Path) -> None:
    fifos(tmp_path, "gone")
    # The kernel closes the fifo of the server's last process: only then does the worker end.
    left = "json.loads(os.environ['TRIREME_TASK'])['restarts_left']"
    ran = run_programs(
        tmp_path,
        {
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


def test_a_job_grows_and_shrinks_as_its_coordinator_says(tmp_path: Path) -> None:
    fifos(tmp_path, "grown", "shrunk", "leave")

    def script(coordinator: FakeCoordinator) -> None:
        names = ("ps:0", "ps:1", "worker:0", "worker:1")
        coordinator.say(Membership(joined=True, formed=True, wanted=names, requests=1))
        (tmp_path / "grown").read_text()
        staying, leaving = ("ps:0", "worker:0"), ("ps:1", "worker:1")
        coordinator.say(
            Membership(joined=True, formed=True, wanted=staying, dismissed=leaving, requests=2)
        )
        for name in ("leave", "shrunk"):
            (tmp_path / name).write_text("")

    ran = run_programs(
        tmp_path,
        {
            "ps:0": FOR_EVER,
            "worker:0": "open(HERE + '/shrunk').read(); signal.sigtimedwait([], 0.3); print(1)",
            "ps:1": "print('ps:1 is here'); open(HERE + '/grown', 'w').close()",
            "worker:1": "open(HERE + '/leave').read(); sys.exit('it left in a hurry')",
        },
        limits=limits(),
        later=("ps:1", "worker:1"),
        script=script,
    )
    assert ran.status == 0, ran.err
    assert "ps:1 is started: the job was made larger" in ran.err
    assert "ps:1 | ps:1 is here" in ran.out
    assert set(ran.record.pids) == {"ps:0", "ps:1", "worker:0", "worker:1"}
    assert_nobody_left(ran)
