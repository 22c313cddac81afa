"""Steps whose loss is not finite are counted as what they are."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness import Cluster, run_job
from trireme.session.session import Session

GOOD = (torch.ones(8, 4), torch.zeros(8, 1))
BAD = (torch.full((8, 4), float("nan")), torch.zeros(8, 1))


def said(cluster: Cluster, batches: list[Any]) -> list[str]:
    """Trains by these batches; returns what the first worker says."""

    def session(worker: int) -> Session:
        return Session(
            torch.nn.Linear(4, 1),
            torch.nn.functional.mse_loss,
            lambda params: torch.optim.SGD(params, lr=0.01),
            nan="skip",
            max_steps=len(batches) * cluster.workers,
        )

    def program(session: Session) -> list[str]:
        lines: list[str] = []
        shown = session.recorder._progress
        with (
            mock.patch.object(shown, "message", lines.append),
            mock.patch.object(shown, "warn", lines.append),
        ):
            for batch in batches:
                session.step(batch)
            session.job.end()
            session.recorder.finish()
        return lines

    return run_job(cluster, session, program).values[0]


@pytest.mark.parametrize("prefetch", [False, True])
def test_skips_are_said_and_are_no_applied_updates(prefetch: bool) -> None:
    lines = said(Cluster(1, 1, "async", prefetch=prefetch), [GOOD, BAD, GOOD, BAD, GOOD])
    assert "5 local steps: 3 applied, 2 skipped: the loss was not finite" in lines
    assert sum("its update is left out" in line for line in lines) == 1


def test_skips_are_said_under_plain_python() -> None:
    lines = said(Cluster(1, 0), [GOOD, BAD, GOOD])
    assert "3 steps, 1 skipped: the loss was not finite" in lines


def test_without_skips_nothing_is_said_of_them() -> None:
    assert not any("skipped" in line for line in said(Cluster(1, 1, "async"), [GOOD] * 3))
