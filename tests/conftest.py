"""What tests of several packages share."""

from __future__ import annotations

import gc
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import hypothesis
import pytest

from tests.process_state import ProcessState

# Before torch is imported: several test processes with several threads each would fight over cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `make test` and `make test-all`: the option --hypothesis-profile has precedence over this.
# Continuous integration tries the same examples every time; other runs, new ones.
hypothesis.settings.register_profile("work", max_examples=30, deadline=None)
hypothesis.settings.register_profile("all", max_examples=30, deadline=None, derandomize=True)
hypothesis.settings.load_profile("work")

_PARTS = {"pipeline", "graph", "fsdp", "tp", "pp"}
_WORD = re.compile(r"\w+")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
PYTHONPATH = os.pathsep.join([str(ROOT / "tests" / "startup"), PACKAGES])
"""For the processes that tests start."""


def python_path(words: Iterable[object]) -> str:
    """Returns `PYTHONPATH` for a command.

    Processes that hold parts of one model need torch's compiler from the start: the process that
    `trireme run` forks them from loads it once, where with `tests/startup` each would by itself.
    """
    given = [str(word) for word in words]
    return (
        PACKAGES
        if "run" in given and _PARTS.intersection(_WORD.findall(" ".join(given)))
        else PYTHONPATH
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs, but from `tests/gpu` alone; refuses entry points that are not those installed."""
    if not all("gpu" in Path(given).parts for given in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # processes that train together would take them
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", default=None):
        # Not where pytest starts its own workers, which need the compiler whole.
        os.environ.setdefault("PYTHONPATH", PYTHONPATH)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for group, named in project["entry-points"].items():
        if not named.items() <= {(each.name, each.value) for each in entry_points(group=group)}:
            raise pytest.UsageError(
                f"the entry points {group} of pyproject.toml are not those that are installed: "
                "`make venv`, or .venv/bin/pip install --no-deps -e . -q"
            )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Each of several processes compiles its share of the files of tests before it collects all.

    Otherwise, in a fresh clone, each would compile every file, a third of a minute, at the same
    time as the others. What is collected stays: no search for garbage need look at it again.
    """
    gc.disable()
    given = getattr(session.config, "workerinput", None)
    if given and session.config.args_source != pytest.Config.ArgsSource.ARGS:
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        for file in files[int(given["workerid"][2:]) :: given["workercount"]]:
            # What cannot be imported, or says skip, does so again where it is collected.
            with suppress(Exception, pytest.skip.Exception):
                import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuses names of tests that differ from process to process: several share one run.

    Of a test with `@pytest.mark.thorough(but=(...))` the cases that are named stay in `make test`,
    and of one with `@pytest.mark.slow(but=(...))` in `make test-all`: cases that there are. With
    `one_in=3` the first case of each three stays.
    """
    if not any("::" in given for given in config.args):
        _check_exceptions(items)
    places: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        marks, place = item.own_markers, places[test]
        item.own_markers = [mark for mark in marks if not _excepted(item, mark, place)]
        places[test] += 1
    named = [item.nodeid for item in items if _ADDRESS.search(item.nodeid)]
    if named:
        raise pytest.UsageError(
            f"{len(named)} tests have an address of memory in their names, such as {named[0]}: "
            "give their parameters ids"
        )


def _check_exceptions(items: list[pytest.Item]) -> None:
    """Refuses a `but` that names no case: the test would be in none of those commands."""
    named: set[tuple[str, str]] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        for mark in item.own_markers:
            if mark.name in ("slow", "thorough"):
                named |= {(test, case) for case in mark.kwargs.get("but", ())}
    there = {(item.nodeid.partition("[")[0], item.nodeid.partition("[")[2][:-1]) for item in items}
    if named - there:
        test, case = min(named - there)
        raise pytest.UsageError(f"{test} has no case {case!r}, which its marker excepts")


def _excepted(item: pytest.Item, mark: pytest.Mark, place: int) -> bool:
    """Returns whether a marker is for other cases of a test than this one, by name or place."""
    named = any(f"[{case}]" in item.name for case in mark.kwargs.get("but", ()))
    stays = "one_in" in mark.kwargs and place % mark.kwargs["one_in"] == 0
    return mark.name in ("slow", "thorough") and (named or stays)


def real_data(name: str) -> Path:
    """The folder `name` of the real data; skips the test where there is none."""
    variable = os.environ.get("TRIREME_DATA")
    base = Path(variable) if variable else ROOT.parent / "shared" / "data"
    if not (base / name).is_dir():
        pytest.skip(
            f"no {base / name}: real data are looked for in the folder that TRIREME_DATA names, "
            "else in ../shared/data beside the project"
        )
    return base / name


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """MNIST's four IDX files."""
    return real_data("mnist")


@pytest.fixture(scope="session")
def cifar_dir() -> Path:
    """A sample of CIFAR-10 in its binary version."""
    return real_data("cifar-10-batches-bin")


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Gives each test the environment that the run began with: a task writes into its own.

    A session that is deterministic makes torch so, for the rest of its process.
    """
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
    torch = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that would spoil others of its process: they run in any order."""
    state = ProcessState()
    yield
    ray = request.node.get_closest_marker("ray")  # its nodes live on, and it handles signals
    assert ray is not None or state.changes() == []
