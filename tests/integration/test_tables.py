"""Tables whose workers and servers are killed, come and go: each update is in the rows, once.

The program is `programs/table_counting.py`: the rows count the updates of each worker.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from benchmarks.processes import free_ports
from tests.faults.processes import Tasks
from tests.integration.shell import PROGRAMS, PYTHON, Ended, Running, Shell
from tests.integration.test_counting import notes, saved, table
from tests.integration.test_lost_servers import release, until
from trireme.session.checkpoint import list_checkpoints

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

SHARED, FRESH, FIRST = 40, 300, 1 << 40
PAUSE = 0.02


def counting(shell: Shell, steps: int, *words: object, pause: float = PAUSE) -> Running:
    """Starts the counting program, which makes no pauses any more once it is released."""
    program = (PROGRAMS / "table_counting.py", "--out", "out", "--max-steps", steps)
    paces = ("--pause", pause, "--pause-until", "released")
    return shell.start("run", *words, "--run-dir", "run", *program, *paces)


def updates(shell: Shell, ended: Ended, steps: int, workers: int = 2) -> list[int]:
    """Returns each worker's updates as its row counts them; all other rows must agree."""
    assert ended.status == 0, ended.text
    data = saved(shell, steps)
    keys, rows = data.tables["counts/keys"].numpy(), data.tables["counts/rows"].numpy()
    rows = rows.reshape(keys.size, -1)
    assert (rows == rows[:, :1]).all(), "a row is torn"
    counts = dict(zip(keys.tolist(), rows[:, 0].tolist(), strict=True))
    assert all(counts[-1 - shared] == steps for shared in range(SHARED))
    fresh = [count for key, count in counts.items() if key >= FIRST]
    assert fresh == [1] * (FRESH * steps), "each was updated once"
    own = [counts[worker] for worker in range(workers)]
    assert own == [table(data)[worker] for worker in range(workers)]
    assert sum(own) == steps
    trained = data.tables["trained/touches"].numpy()
    np.testing.assert_array_equal(trained, np.full(SHARED, steps))
    return own


def all_known(shell: Shell, own: list[int]) -> None:
    """Every update that a worker has attempted was acknowledged, and is in its row."""
    known = [notes(shell, worker) for worker in range(len(own))]
    assert own == [one["applied"] for one in known] == [one["attempted"] for one in known]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("transport", [(), ("--transport", "tcp")], ids=["shared memory", "tcp"])
def test_a_killed_worker_s_updates_count_once(shell: Shell, transport: tuple[str, ...]) -> None:
    steps = 120
    words = ("--ps", 2, "--workers", 2, "--strategy", "async", "--max-restarts", 2, *transport)
    running = counting(shell, steps, *words)
    tasks = Tasks(shell.directory / "run")
    until(shell, 15)
    assert tasks.kill("worker:1")
    release(shell)
    ended = running.ended()
    assert ended.err.count("worker:1 failed: killed by SIGKILL; started again") == 1, ended.err
    own, (first, second) = updates(shell, ended, steps), (notes(shell, 0), notes(shell, 1))
    assert first["attempted"] == first["applied"] == own[0]
    # Of the one that was under way nobody but the servers knows what became.
    assert second["applied"] <= own[1] <= second["attempted"] <= second["applied"] + 1


@pytest.mark.thorough
def test_a_killed_server_costs_no_row(shell: Shell) -> None:
    """The table grows meanwhile: each update makes hundreds of rows."""
    steps = 120
    words = ("--ps", 2, "--replicas", 2, "--workers", 2, "--strategy", "async")
    running = counting(shell, steps, *words)
    until(shell, 15)
    assert Tasks(shell.directory / "run").kill("ps:1")
    release(shell)
    all_known(shell, updates(shell, running.ended(), steps))


@pytest.mark.slow
def test_servers_that_are_killed_in_turn_cost_no_row(shell: Shell) -> None:
    """Each one has been filled while rows were updated, and then has the only copy."""
    steps = 2000
    words = ("--ps", 2, "--replicas", 2, "--workers", 2, "--strategy", "async")
    running = counting(shell, steps, *words, "--max-restarts", 5, pause=0.1)
    until(shell, 15)
    for server in (1, 0, 1):
        before = placement(shell)["generation"]
        assert Tasks(shell.directory / "run").kill(f"ps:{server}")
        until_filled(shell, after=before)
    assert running.process.poll() is None, "the job had ended before all were killed"
    release(shell)
    ended = running.ended()
    assert "goes back" not in ended.text, "a shard was lost"
    all_known(shell, updates(shell, ended, steps))


def placement(shell: Shell) -> Any:
    return json.loads(shell.run("status", "--json", "run").out)["placement"]


def until_filled(shell: Shell, after: int) -> None:
    """Waits until each server is primary and backup again, in a later generation than `after`."""
    deadline = time.monotonic() + 60
    while True:
        found = placement(shell)
        holders = [(shard["primary"], *shard["backups"]) for shard in found["shards"]]
        whole = sorted(holders) == [("ps:0", "ps:1"), ("ps:1", "ps:0")]
        if whole and not found["moving"] and found["generation"] > after:
            return
        assert time.monotonic() < deadline, f"a server is not filled: {found}"


@pytest.mark.slow
def test_tables_that_are_lost_begin_again_with_the_steps(shell: Shell) -> None:
    """No worker has their rows: steps that went on would count updates that are nowhere."""
    steps = 120
    words = ("--ps", 2, "--replicas", 2, "--workers", 2, "--max-restarts", 5)
    running = counting(shell, steps, *words)
    until(shell, 15)
    tasks = Tasks(shell.directory / "run")
    assert tasks.kill("ps:0") and tasks.kill("ps:1")
    release(shell)
    ended = running.ended()
    assert "were lost before the first checkpoint" in ended.text, ended.text
    updates(shell, ended, steps)


@pytest.mark.slow
def test_a_job_that_loses_tables_leaves_no_checkpoint_without_them(shell: Shell) -> None:
    running = counting(shell, 10**6, "--ps", 2, "--workers", 2)
    until(shell, 15)
    assert Tasks(shell.directory / "run").kill("ps:1")
    ended = running.ended()
    assert ended.status != 0
    assert "are lost: no worker has the rows of sparse tables" in ended.text, ended.text
    assert not list_checkpoints(shell.directory / "run")


@pytest.mark.slow
def test_a_table_moves_to_other_servers_while_it_is_updated(shell: Shell) -> None:
    steps = 600
    running = counting(shell, steps, "--ps", 2, "--workers", 2, "--strategy", "async", pause=0.05)
    until(shell, 15)
    for servers in (3, 1):
        scaled = shell.run("scale", "--ps", servers, "run")
        assert scaled.status == 0, scaled.text
    assert running.process.poll() is None, "the job had ended before it was made smaller"
    release(shell)
    all_known(shell, updates(shell, running.ended(), steps))


OWN = """
import sys, trireme
worker, servers = int(sys.argv[1]), sys.argv[2]
with trireme.ps.connect("run", servers=servers, worker=worker, workers=2, strategy="ssp") as ps:
    ps.create("totals", (2, 2), dtype="int64")
    for _ in range(20):
        ps.push("totals", [worker], [[1, worker]])
        ps.clock()
    ps.finish()
    print("totals", ps.pull("totals").tolist())
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_programs_name_servers_that_were_started_by_hand(shell: Shell) -> None:
    (shell.directory / "own.py").write_text(OWN)
    servers = ",".join(f"localhost:{port}" for port in free_ports(2))
    hosts = ("--job-name", "ps", "--ps-hosts", servers, "--worker-hosts", "localhost:1,localhost:2")
    started = [shell.start("task", *hosts, "--task-index", index) for index in range(2)]
    started += [shell.start("own.py", w, servers, command=PYTHON) for w in range(2)]
    for each in started:
        assert each.ended().status == 0, each.ended().text
    for each in started[2:]:
        assert "totals [[20, 0], [20, 20]]" in each.ended().out
    assert [path.name for path in list_checkpoints(shell.directory / "run")][-1:] == [
        "step-000000040-writer-1"
    ]
