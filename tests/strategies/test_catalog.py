"""Strategies by name, and what their options may be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.metadata import forget, write_metadata
from trireme.errors import ConfigurationError
from trireme.job_config import STRATEGIES, JobConfig
from trireme.ps.rule import Rule
from trireme.strategies import SSP, Strategy, Sync, choose, strategy_class


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
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs a package with the strategy `own`, from the code of its module."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def installed(code: str) -> None:
        (tmp_path / "own_strategies.py").write_text(code)
        points = "[trireme.strategies]\nown = own_strategies:Own"
        write_metadata(tmp_path, "own-strategies", points=points)

    yield installed
    sys.modules.pop("own_strategies", None)
    monkeypatch.undo()
    forget()


Install = Callable[[str], None]
OWN = JobConfig().replaced("a test", strategy="own")
CLASS = """
from dataclasses import dataclass
from trireme.strategies import Rule, Strategy

@dataclass(frozen=True)
class Own(Strategy):
    name = "own"
    def rule(self):
        return Rule(aggregate=0, staleness=0, every=4)
    def outer(self, workers):
        return {"lr": 1}
"""


def test_a_broken_package_stops_only_the_jobs_that_ask_for_its_strategy(install: Install) -> None:
    install("raise LookupError('no such thing')")
    asked = JobConfig().with_values({"strategy": "ssp", "staleness": 2, "ps": 1}, {})
    assert choose(asked, workers=2, servers=1) == SSP(2)
    assert choose(JobConfig(), workers=2, servers=1).name == "async"
    with pytest.raises(ConfigurationError, match=r"own of own-strategies 1\.5, own_str.*, cannot"):
        choose(OWN, workers=2, servers=1)


@pytest.mark.parametrize(
    ("right", "wrong", "why"),
    [
        ("class Own(Strategy)", "class Own", "is no frozen dataclass derived"),
        (
            "@dataclass(frozen=True)\nclass Own",
            "Own = 1\nclass Other",
            "is no frozen dataclass derived",
        ),
        ("@dataclass(frozen=True)", "", "is no frozen dataclass derived"),
        ("def rule", "def rules", r"with rule\(\) and name = 'own'"),
        ('name = "own"', "", r"with rule\(\) and name = 'own'"),
        ("aggregate=0", "aggregate='all'", r"Expected `int`, got `str` - at `\$.aggregate`"),
        ("staleness=0", "staleness=3", "aggregate is 0: it must be 1 unless staleness is 0"),
        ("return Rule", "Rule", "the rule None"),
        (", every=4", "", "a rule with `every` needs outer"),
        ('{"lr": 1}', "None", "a rule with `every` needs outer"),
        ('{"lr": 1}', "1", "Expected `object`, got `int`"),
        ('"lr": 1', '"learning_rate": 1', "unknown field `learning_rate`"),
        ('"lr": 1', '"lr": "1"', "Expected `float`, got `str`"),
        ('"lr": 1', '"lr": -1', r">= 0.0 - at `\$.lr`"),
        ('"lr": 1', '"lr": float("nan")', r"\$.lr|lr is nan"),
        ('"lr": 1', '"lr": 1, "momentum": -0.5', r">= 0.0 - at `\$.momentum`"),
        ('"lr": 1', '"lr": 1, "weight_decay": float("inf")', r"<= 1.797.*\$.weight_decay"),
        ('"lr": 1', '"lr": 1, "nesterov": True', "nesterov needs a momentum above 0"),
        ("return Rule", "raise LookupError('no plan')  #", r"rule\(\) raised LookupError: no plan"),
        ('return {"lr": 1}', "return 1 / 0", r"outer\(\) raised ZeroDivisionError: division"),
        ("def rule", "def check(self, **_): self.plan\n    def rule", r"check\(\) raised Attribu"),
        ("def rule", "def __post_init__(self): self.plan\n    def rule", "constructor raised Attr"),
    ],
)
def test_a_strategy_that_is_wrong_is_refused_at_launch(
    install: Install, right: str, wrong: str, why: str
) -> None:
    assert right in CLASS
    install(CLASS.replace(right, wrong))
    with pytest.raises(ConfigurationError, match=why) as refused:
        choose(OWN, workers=2, servers=1)
    assert "own of own-strategies 1.5, own_strategies:Own, " in str(refused.value)


def test_a_strategy_of_the_program_that_is_wrong_is_named_by_its_class() -> None:
    @dataclass(frozen=True)
    class Mine(Strategy):
        name: ClassVar[str] = "mine"

        def rule(self) -> Rule:
            raise LookupError("no plan")

    said = r"the strategy mine, tests\..*Mine, fails: rule\(\) raised LookupError: no plan; mend it"
    with pytest.raises(ConfigurationError, match=said):
        choose(JobConfig(), Mine(), workers=2, servers=1)


def test_a_strategy_of_another_package_is_chosen_by_its_name(install: Install) -> None:
    install(CLASS)
    assert choose(OWN, workers=2, servers=1).name == "own"


def test_an_option_that_only_the_programs_strategy_may_have_says_to_name_it_at_launch() -> None:
    config = JobConfig().replaced("command line", staleness=2)
    with pytest.raises(ConfigurationError, match="ssp or averaging, also where the program choos"):
        choose(config, workers=2, servers=1)
