"""A short run with faults, of which every update is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import arguments, compare_accuracy, run
from tests.chaos.faults import FAULTS
from tests.faults.hosts import NoHosts, network
from tests.faults.limits import CannotLimit

pytestmark = pytest.mark.processes

LIMIT = 150.0
"""How many seconds of training may pass until each fault was made. A busy machine needs most."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_are_killed_on_hosts_of_their_own_and_every_update_counts_once(
    mnist_dir: Path,
) -> None:
    words = ["--data", str(mnist_dir), "--interval", "2", "--seed", "3"]
    sizes = ["--servers", "2", "--workers", "2", "--replicas", "1"]
    options = arguments([*words, *sizes])
    try:
        with network(["alder", "birch"]) as hosts:
            outcome = run(options, LIMIT, [FAULTS["kill worker"]], hosts, once=True)
    except NoHosts as error:
        pytest.skip(f"NO HOSTS ARE TESTED: {error}")
    assert outcome.problems == []
    assert len(outcome.struck) >= 1
    unheard = 2 + len(outcome.struck) - len(outcome.accounts)
    assert unheard in (0, 1)  # the last one killed may join again just as the job ends
    assert sum(account.ended for account in outcome.accounts.values()) == 2 - unheard
    assert sum(account.applied[0] for account in outcome.accounts.values()) > 100


@pytest.mark.thorough
@pytest.mark.slow(but=("hosts-tls",))
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("kill server", "stop server", "starve server"), ()),
        (("cut host", "mute host", "deafen host", "slow host"), ()),
        (("cut pair",), ()),
        (("kill server", "kill worker", "cut host", "deafen host"), ("--tls",)),
        (("kill server", "cut host"), ("--tls",)),
    ],
    ids=["servers", "hosts", "pairs", "tls", "hosts-tls"],
)
def test_tasks_and_hosts_are_lost_and_every_update_counts_once(
    names: tuple[str, ...], words: tuple[str, ...], mnist_dir: Path
) -> None:
    sizes = ["--servers", "2", "--workers", "2", "--replicas", "2", "--deadline", "2"]
    paces = ["--interval", "3", "--pause", "0.01"]
    options = arguments(["--data", str(mnist_dir), "--seed", "3", *paces, *sizes, *words])
    faults = [FAULTS[name] for name in names]
    try:
        with network(["alder", "birch"]) as hosts:
            outcome = run(options, LIMIT, faults, hosts, once=True)
    except (NoHosts, CannotLimit) as error:
        pytest.skip(f"NO HOSTS ARE TESTED: {error}")
    assert outcome.problems == []
    assert {each.fault for each in outcome.struck} == set(names)


def test_accuracies_are_compared_after_as_many_updates() -> None:
    quiet = {1000: 90.0, 2000: 95.0}
    assert compare_accuracy(quiet, {1000: 90.4, 2000: 94.6, 9000: 99.0}) == []
    assert compare_accuracy(quiet, {990: 90.6}) == [], "as two runs differ"
    assert compare_accuracy(quiet, {990: 92.0}) == [
        "accuracy 92.00% after 990 updates, and 90.00% after 1000 when quiet"
    ]
    assert compare_accuracy({500: 85.0, 1529: 93.3}, {2500: 94.1}) == [], "on a slow machine"
