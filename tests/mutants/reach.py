"""Which tests run which lines, and how long each takes: one run of the tests under coverage."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import hypothesis
import pytest

from tests.mutants.tree import Tree

LIMIT = 1200.0
"""Seconds that all tests may take."""

LEFT_OUT = re.compile(
    r"_is_found"
    r"|shows_a_failing_schedule"
    r"|test_every_invariant_holds\[\w+-[1-9]"
)
"""Tests that pass when something is broken; and most of the schedules of the simulator's tests."""


@dataclass
class Reach:
    """What a run of all tests has shown.

    Attributes:
        seconds: how long each test took, by its id.
        lines: by file and line, the tests that run it.
        failed: tests that fail unchanged, and find nothing therefore.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def tests(self, path: str, lines: Iterable[int], *, in_function: bool) -> list[str]:
        """Returns the tests worth running for a change in these lines, the best first.

        Those that mirror the file come first, then the quick ones. Of what is run when the file is
        imported, every test of the file may show it, and those that mirror it, for a value's
        defaults show though no line of the file is run.
        """
        reached = self.lines.get(path, {})
        found = set().union(*(reached.get(line, set()) for line in lines))
        if not found and not in_function:
            found = set().union(*reached.values())
        within, stem = Path(path).parent, Path(path).stem
        mirror = f"tests/{within.relative_to(within.parts[0])}/test_{stem}"
        if not in_function:
            found |= {test for test in self.seconds if test.startswith(mirror)}
        usable = [test for test in found if test not in self.failed]
        return sorted(usable, key=lambda t: (not t.startswith(mirror), self.seconds[t], t))


def pytest_arguments(timeout: float) -> list[str]:
    """Returns how to run pytest in a tree, with Hypothesis drawing the same and not shrinking."""
    hypothesis.settings.register_profile(
        "mutants",
        database=None,
        deadline=None,
        suppress_health_check=[*hypothesis.HealthCheck],
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    return [
        "-q",
        "--hypothesis-profile=mutants",
        "--no-header",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
        f"--timeout={timeout:.0f}",
    ]


def measure(tree: Tree, folders: Sequence[str], jobs: int, kept: Path) -> Reach:
    """Runs all tests of some folders, in several processes.

    Args:
        tree: where.
        folders: of tests.
        jobs: how many processes.
        kept: where measurements are kept: a test file is measured again where it has changed, or
            any file that is not a test.
    """
    marks = _marks(tree.root, folders)
    known = _read(kept)
    found = {name: known[name] for name in marks if known.get(name, {}).get("mark") == marks[name]}
    missing = [name for name in marks if name not in found]
    # The largest files are spread first.
    missing.sort(key=lambda name: -(tree.root / name).stat().st_size)
    results = [tree.root / f"reach-{share}.json" for share in range(jobs)]
    children = [
        tree.fork(_Measuring(tree.root, missing[share::jobs], result), limit=LIMIT, compiles=True)
        for share, result in enumerate(results)
    ]
    try:
        for child in children:
            while child.ended() is None:
                time.sleep(0.1)
    except BaseException:
        for child in children:
            child.kill()
        raise
    for result in results:
        if not result.exists():
            raise SystemExit(f"the tests could not be run:\n{tree.output()}")
        for name, told in _read(result).items():
            found[name] = {"mark": marks[name], **told}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found), encoding="utf-8")
    reach = Reach()
    for told in found.values():
        _add(reach, told)
    return reach


def _marks(root: Path, folders: Sequence[str]) -> dict[str, str]:
    """Returns each test file with a digest of it and of all that is no test."""
    others = hashlib.sha256()
    for file in [*sorted(root.rglob("*.py")), *root.glob("pyproject.toml")]:
        path = file.relative_to(root)
        if not file.name.startswith("test_") and path.parts[:2] != ("tests", "mutants"):
            others.update(f"{path}\n".encode() + file.read_bytes())
    marks: dict[str, str] = {}
    for folder in folders:
        for file in sorted((root / folder).rglob("test_*.py")):
            digest = others.copy()
            digest.update(file.read_bytes())
            marks[str(file.relative_to(root))] = digest.hexdigest()
    return marks


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _add(reach: Reach, told: dict[str, Any]) -> None:
    reach.seconds |= told["seconds"]
    reach.failed += told["failed"]
    for path, lines in told["lines"].items():
        into = reach.lines.setdefault(path, defaultdict(set))
        for line, tests in lines.items():
            into[int(line)] |= set(tests)


class _Measuring:
    """One process's share of the run; told by test file."""

    def __init__(self, root: Path, files: Sequence[str], result: Path) -> None:
        self.root = root
        self.result = result
        self.told: dict[str, Any] = {
            file: {"seconds": {}, "failed": [], "lines": {}} for file in files
        }

    def __call__(self) -> int:
        status = 0
        if self.told:
            self.coverage = coverage.Coverage(
                data_file=None, config_file=False, include=[f"{self.root}/trireme/*"]
            )
            self.coverage.start()
            status = pytest.main([*pytest_arguments(LIMIT), *self.told], plugins=[self])
            self.coverage.stop()
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                return int(status)
            self._take_lines()
        self.result.write_text(json.dumps(self.told), encoding="utf-8")
        return int(status)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not LEFT_OUT.search(item.nodeid)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self.coverage.switch_context(item.nodeid)
        began = time.monotonic()
        result = yield
        self._of(item.nodeid)["seconds"][item.nodeid] = time.monotonic() - began
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._of(report.nodeid)["failed"].append(report.nodeid)

    def _of(self, test: str) -> dict[str, Any]:
        return self.told[test.split("::")[0]]

    def _take_lines(self) -> None:
        data = self.coverage.get_data()
        for file in data.measured_files():
            path = str(Path(file).relative_to(self.root))
            for line, tests in data.contexts_by_lineno(file).items():
                for test in filter(None, tests):
                    into = self._of(test)["lines"].setdefault(path, {})
                    into.setdefault(str(line), []).append(test)
