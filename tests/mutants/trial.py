"""Tries mutants: each in a process of its own, by the tests that reach it, until one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.operators import Mutant
from tests.mutants.reach import Reach, pytest_arguments
from tests.mutants.tree import Child, Tree

START = 60.0
"""Seconds that a process may take before its first test, on a busy machine. Too few, and
what is only slow counts as caught."""


@dataclass(frozen=True)
class Result:
    """What became of a mutant.

    Attributes:
        mutant: which.
        caught: whether a test failed, or nothing came to an end.
        by: the test that failed, or what else caught it; how many tests did not, where none did.
        seconds: how long it took.
    """

    mutant: Mutant
    caught: bool
    by: str
    seconds: float


def try_all(
    mutants: Iterable[Mutant], trees: Sequence[Tree], reach: Reach, seconds: float
) -> Iterator[Result]:
    """Tries mutants, one in each tree at a time; yields the results as they come.

    Args:
        mutants: which; the next is taken when a tree is free.
        trees: copies to change.
        reach: which tests run what.
        seconds: how long the tests of one mutant may take together, unchanged; the others are left
            out.
    """
    idle = list(trees)
    running: list[_Trial] = []
    left = iter(mutants)
    try:
        while True:
            while idle and (mutant := next(left, None)) is not None:
                running.append(_Trial(mutant, idle.pop(), reach, seconds))
            if not running:
                return
            for trial in [*running]:
                result = trial.result()
                if result is not None:
                    running.remove(trial)
                    idle.append(trial.tree)
                    yield result
            time.sleep(0.02)
    finally:
        for trial in running:
            trial.give_up()


class _Trial:
    """One mutant that is being tried."""

    def __init__(self, mutant: Mutant, tree: Tree, reach: Reach, seconds: float) -> None:
        self.mutant, self.tree = mutant, tree
        self.began = time.monotonic()
        self.tests = _affordable(_reaching(mutant, reach), reach, seconds)
        self.failed = tree.root / "failed"
        self.failed.unlink(missing_ok=True)
        self._stack = ExitStack()
        self._child: Child | None = None
        if self.tests:
            self._stack.enter_context(tree.changed(mutant.path, mutant.text))
            took = [reach.seconds[test] for test in self.tests]
            run = _Run(self.tests, self.failed, timeout=max(START, 4 * max(took)))
            self._child = tree.fork(run, limit=START + 4 * sum(took))

    def result(self) -> Result | None:
        """Returns how it ended; None while it runs."""
        if self._child is None:
            return Result(self.mutant, False, "no test runs it", 0.0)
        status = self._child.ended()
        if status is None:
            return None
        self._stack.close()
        return Result(self.mutant, *self._outcome(status), time.monotonic() - self.began)

    def _outcome(self, status: int) -> tuple[bool, str]:
        if self.failed.exists():
            return True, self.failed.read_text(encoding="utf-8")
        if status == pytest.ExitCode.OK:
            return False, f"not by {len(self.tests)} tests"
        if status < 0:
            return True, f"signal {-status}, or too slow"
        return True, "cannot be imported, or ends the tests"

    def give_up(self) -> None:
        """Ends it, and changes the file back."""
        if self._child is not None:
            self._child.kill()
        self._stack.close()


def _reaching(mutant: Mutant, reach: Reach) -> list[str]:
    return reach.tests(mutant.path, mutant.lines, in_function=mutant.in_function)


def _affordable(tests: Sequence[str], reach: Reach, seconds: float) -> list[str]:
    """Returns the first tests, as many as run in some seconds."""
    chosen: list[str] = []
    for test in tests:
        seconds -= reach.seconds[test]
        if seconds < 0 and chosen:
            break
        chosen.append(test)
    return chosen


class _Run:
    """Runs chosen tests in their order, and writes down the first that fails."""

    def __init__(self, tests: Sequence[str], failed: Path, timeout: float) -> None:
        self.rank = {test: rank for rank, test in enumerate(tests)}
        self.failed = failed
        self.timeout = timeout

    def __call__(self) -> int:
        """Runs the files of the first tests, then the others: to import them takes long as well."""
        files = list(dict.fromkeys(test.split("::")[0] for test in self.rank))
        for stage in filter(None, (files[:1], files[1:])):
            status = pytest.main([*pytest_arguments(self.timeout), "-x", *stage], plugins=[self])
            if status != pytest.ExitCode.OK:
                return int(status)
        return 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        rank: Callable[[pytest.Item], int] = lambda item: self.rank[item.nodeid]  # noqa: E731
        items[:] = sorted((item for item in items if item.nodeid in self.rank), key=rank)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.write_text(report.nodeid, encoding="utf-8")
