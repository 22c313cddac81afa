"""Strategies by name, and what their options may be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.metadata import forget, write_metadata
from trireme.errors import ConfigurationError
from trireme.job_config import STRATEGIES, JobConfig
from trireme.strategies import SSP, Sync, choose, strategy_class


def test_a_strategy_has_the_name_of_its_entry_point() -> None:
    assert [strategy_class(name).name for name in STRATEGIES] == STRATEGIES.names()
    assert {"async", "ssp", "sync"} <= set(STRATEGIES)  # of the core


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_without_a_name_the_cluster_decides(workers: int, servers: int) -> None:
    chosen = choose(JobConfig(), workers=workers, servers=servers)
    assert chosen.name == ("async" if servers or workers == 1 else "allreduce")
    sync = JobConfig().replaced("a test", strategy="sync")
    assert choose(JobConfig(), SSP(2), workers=2, servers=1) == SSP(2)
    assert choose(sync, "ssp", workers=2, servers=1) == Sync()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 2, "strategy": "ssp"}, "add --ps 1, or use --strategy allreduce"),
        ({"ps": 1, "strategy": "pipeline"}, r"has no parameter servers.*\(strategy: file x\)"),
        ({"ps": 1, "aggregate": 2, "strategy": "sync"}, "2 and 1 workers: a round could never"),
    ],
)
def test_what_the_launch_contradicts_is_refused(given: dict[str, Any], message: str) -> None:
    config = JobConfig().with_values(given, {"strategy": "file x"})
    with pytest.raises(ConfigurationError, match=message):
        choose(config, workers=given.get("workers", 1), servers=config.tasks.ps)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"workers": 3, "ps": 1, "strategy": "sync", "aggregate": 2},
        {"workers": 3, "ps": 1, "strategy": "ssp", "staleness": 2},
    ],
)
def test_what_makes_sense_passes(given: dict[str, Any]) -> None:
    config = JobConfig().with_values(given, {})
    choose(config, workers=given.get("workers", 1), servers=config.tasks.ps)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a strategy whose package cannot be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "torn_strategies.py").write_text("raise LookupError('no such thing')")
    points = "[trireme.strategies]\ntorn = torn_strategies:Torn"
    write_metadata(tmp_path, "torn-strategies", points=points)
    yield "torn"
    monkeypatch.undo()
    forget()


def test_a_broken_package_stops_only_the_jobs_that_ask_for_its_strategy(broken: str) -> None:
    asked = JobConfig().with_values({"strategy": "ssp", "staleness": 2, "ps": 1}, {})
    assert choose(asked, workers=2, servers=1) == SSP(2)
    assert choose(JobConfig(), workers=2, servers=1).name == "async"
    with pytest.raises(ConfigurationError, match=r"torn of torn-strategies 1\.5 cannot be impor"):
        choose(JobConfig().replaced("a test", strategy=broken), workers=2, servers=1)
