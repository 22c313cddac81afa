"""A short run with faults, of which every update is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import arguments, compare_accuracy, run
from tests.chaos.faults import FAULTS
from tests.faults.hosts import NoHosts, network

pytestmark = pytest.mark.processes


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_workers_are_killed_on_hosts_of_their_own_and_every_update_counts_once(
    mnist_dir: Path,
) -> None:
    words = ["--data", str(mnist_dir), "--interval", "2", "--seed", "3"]
    sizes = ["--servers", "2", "--workers", "2", "--replicas", "1"]
    options = arguments([*words, *sizes])
    try:
        with network(["alder", "birch"]) as hosts:
            outcome = run(options, 12.0, [FAULTS["kill worker"]], hosts)
    except NoHosts as error:
        pytest.skip(f"NO HOSTS ARE TESTED: {error}")
    assert outcome.problems == []
    assert len(outcome.struck) >= 1
    incarnations = len(outcome.accounts)
    assert incarnations == 2 + len(outcome.struck)
    assert sum(account.ended for account in outcome.accounts.values()) == 2
    assert sum(account.applied[0] for account in outcome.accounts.values()) > 100


def test_accuracies_are_compared_after_as_many_updates() -> None:
    quiet = {1000: 90.0, 2000: 95.0}
    assert compare_accuracy(quiet, {1000: 90.4, 2000: 94.6, 9000: 99.0}) == []
    assert compare_accuracy(quiet, {990: 90.6}) == [
        "accuracy 90.60% after 990 updates, and 90.00% after 1000 when quiet"
    ]
