"""Workers that sample topics are killed: no token is counted twice, and none is lost."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")

from tests.faults.processes import Tasks
from tests.integration.shell import PROGRAMS, Shell
from trireme.session.checkpoint import list_checkpoints, load, verify

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("servers", "strategy"),
    [pytest.param(1, ("ssp", "--staleness", 2)), pytest.param(2, ("async",))],
    ids=["ssp", "async on two servers"],
)
def test_a_worker_that_is_killed_goes_on_with_what_it_had_assigned(
    servers: int, strategy: tuple[object, ...], shell: Shell
) -> None:
    """Worker 1 dies before an update, and again when one is applied that it does not hear of."""
    ended = shell.run(
        *("run", "--ps", servers, "--workers", 2, "--strategy", *strategy, "--max-restarts", 2),
        *("--run-dir", "run", PROGRAMS / "topics.py", "--out", "out", "--sweeps", 12),
        *("--kill", "9:before", "--kill", "13:after"),
    )
    assert ended.status == 0, ended.text
    assert ended.err.count("worker:1 failed: killed by SIGKILL; started again") == 2
    with np.load(shell.directory / "out" / "found.npz") as found:
        words, counts, assigned = found["words"], found["counts"], found["assignments"]
        assert counts.sum() == found["totals"].sum() == len(words)
        assert (found["sweeps"] == 13).all(), "each block was sampled as often as was asked for"
        expected = np.zeros_like(counts)
        np.add.at(expected, (words, assigned[assigned > 0] - 1), 1)
        assert np.array_equal(counts, expected), "the counts are those of the assignments"


@pytest.mark.slow
@pytest.mark.thorough
def test_without_a_restart_the_assignments_of_a_worker_that_is_lost_still_count(
    shell: Shell,
) -> None:
    ended = shell.run(
        *("run", "--ps", 1, "--workers", 2, "--strategy", "ssp", "--run-dir", "run"),
        *(PROGRAMS / "topics.py", "--out", "out", "--sweeps", 12, "--kill", "13:before"),
        *("--patience", 2),
    )
    assert ended.status == 0, ended.text
    with np.load(shell.directory / "out" / "found.npz") as found:
        assert found["counts"].sum() == found["totals"].sum() == len(found["words"])
        done = found["sweeps"]
        assert (done[0::2] == 13).all(), "the blocks of worker 0"
        assert done[1::2].sum() == 12, "those of worker 1 stay as they were"


@pytest.mark.slow
@pytest.mark.thorough
def test_checkpoints_are_of_one_step_although_a_server_is_killed(shell: Shell) -> None:
    """In each the counts are those of the assignments, and so they are where it goes on."""
    program = (PROGRAMS / "topics.py", "--out", "out", "--every-steps", 8)
    started = shell.start(
        *("run", "--ps", 3, "--replicas", 2, "--workers", 2, "--strategy", "async"),
        *("--run-dir", "run", *program, "--sweeps", 60),
    )
    run = shell.directory / "run"
    deadline = time.monotonic() + 120
    while len(list_checkpoints(run)) < 6:
        assert time.monotonic() < deadline, "no six checkpoints were saved"
        time.sleep(0.01)
    assert Tasks(run).kill("ps:1")
    ended = started.ended()
    assert ended.status == 0, ended.text
    for path in list_checkpoints(run):
        verify(path)
        assert_exact(path)
    again = shell.run(
        *("run", "--ps", 1, "--workers", 1, "--strategy", "async"),
        *("--run-dir", "run", *program, "--sweeps", 62),
    )
    assert again.status == 0, again.text
    for path in list_checkpoints(run):
        assert_exact(path)
    with np.load(shell.directory / "out" / "found.npz") as found:
        assert (found["sweeps"] == 63).all()
        assert found["counts"].sum() == len(found["words"])


def assert_exact(path: Any) -> None:
    """Checks that the counts of a checkpoint are those of its assignments."""
    tables = load(path).tables
    assigned = tables["assignments/rows"].numpy()
    counts = tables["words/rows"].numpy()
    topics = np.bincount(assigned[assigned > 0] - 1, minlength=counts.shape[1])
    assert np.array_equal(counts.sum(axis=0), topics)
    assert np.array_equal(tables["totals/rows"].numpy()[0][: len(topics)], topics)
