"""Which tests passed without any plug-in: without a single one they need not run again.

They need no plug-in, and `make test` shows that they pass with all. That one plug-in is missing
where the others are there would change them only if another needed it, and which need which is
known: `needs` of `[tool.plugins]`, of which import-linter checks that it is all.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_FILE = Path(os.environ["TRIREME_WITHOUT_PASSED"])


class _Recorder:
    """Writes the names of the tests that passed."""

    def __init__(self) -> None:
        self._passed: set[str] = set()
        self._not: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._not.add(report.nodeid)
        elif report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        _FILE.write_text("\n".join(sorted(self._passed - self._not)), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Records the tests of this run, if no run before it has."""
    if not _FILE.exists() and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that passed."""
    if _FILE.exists():
        passed = set(_FILE.read_text(encoding="utf-8").splitlines())
        left_out = [item for item in items if item.nodeid in passed]
        items[:] = [item for item in items if item.nodeid not in passed]
        config.hook.pytest_deselected(items=left_out)
