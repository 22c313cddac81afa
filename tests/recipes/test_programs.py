"""Each recipe is short, differs little from the plain program, and runs in every way."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.integration.conftest import clean_shell
from tests.integration.shell import Ended
from tests.recipes.ways import ALL, RECIPES, changed_lines, code_lines, losses, run, skip_without
from trireme.session.checkpoint import list_checkpoints, step_of

CASES = [
    (name, way)
    for name, recipe in ALL.items()
    for way in sorted({"plain", "python", "sync", "async", "allreduce", *recipe.parity})
]
Run = Callable[[str, str], tuple[Ended, Path]]


@pytest.mark.parametrize("name", ALL)
def test_at_most_ten_lines_differ_from_the_plain_program(name: str) -> None:
    plain, own = RECIPES / f"{name}_plain.py", RECIPES / f"{name}.py"
    assert 0 < changed_lines(plain, own) <= 10
    assert code_lines(own) <= 30


def test_every_program_is_tested() -> None:
    programs = {path.stem.removesuffix("_plain") for path in RECIPES.glob("*.py")} - {"trackers"}
    assert programs == set(ALL)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a recipe in a way, once for all tests of this module."""

    @cache
    def start(name: str, way: str) -> tuple[Ended, Path]:
        with clean_shell(tmp_path_factory.mktemp("recipe")) as shell:
            return run(shell, name, way), shell.directory

    return start


@pytest.mark.slow
@pytest.mark.recipes
@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "way"), CASES, ids=["-".join(case) for case in CASES])
def test_it_runs(name: str, way: str, ran: Run) -> None:
    skip_without(name)
    ended, directory = ran(name, way)
    assert ended.status == 0, ended.text[-4000:]
    values = losses(ended)
    recipe = ALL[name]
    workers = 1 if way in ("plain", "python", "one worker") else 2
    alone = losses(ran(name, "python")[0])
    assert way == "plain" or len(values) == workers * len(alone), ended.text[-4000:]
    if way in recipe.parity:
        for place, value in enumerate(sorted(values)):
            assert abs(value - sorted(alone * workers)[place]) <= 1e-4
    if way not in ("plain", "python"):
        newest = step_of(list_checkpoints(directory / "run")[-1])
        times = 2 if recipe.loops and way == "async" else 1
        assert newest == recipe.steps * times
    if name == "mlflow_hook" and way != "plain":
        with sqlite3.connect(directory / "mlflow.db") as database:
            assert database.execute("select status from runs").fetchall() == [("FINISHED",)]
            logged = database.execute("select step from metrics where key = 'loss'").fetchall()
            # Asynchronously the other worker may have made nearly all steps.
            assert len(logged) >= (1 if way == "async" else 8)
    if name == "wandb_hook":
        assert len(list(Path(directory, "wandb").glob("offline-run-*"))) == 1
