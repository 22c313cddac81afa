"""What follows from the choices of the launch and the program."""

from __future__ import annotations

import pytest

from tests.harness import Cluster
from trireme.session.options import Options
from trireme.session.settings import Settings


@pytest.mark.parametrize(
    ("cluster", "steps"),
    [
        (Cluster(1, 0), 40),
        (Cluster(4, 1, "async"), 10),
        (Cluster(4, 1, "ssp", staleness=2), 10),
        (Cluster(4, 1, "sync"), 40),
        (Cluster(4, 1, "sync", aggregate=3), 40),
        (Cluster(4, 1, "averaging"), 40),
        (Cluster(4, 1, "averaging", staleness=1), 10),
    ],
    ids=str,
)
def test_a_loop_has_made_its_share_of_the_global_steps(cluster: Cluster, steps: int) -> None:
    assert Settings(cluster.task(0, "x"), Options()).steps_of_a_loop(40) == steps
