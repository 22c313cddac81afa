"""Runs each test until it has passed once, with as few plug-ins as it needs.

A test that passes where a plug-in is not installed does not need it. That it passes where others
are installed too, `make test` shows; together they could change it only if one needed another, and
which need which is known: `needs` of `[tool.plugins]`, which import-linter checks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.without.skips import GONE, REASON

_FILE = Path(os.environ["TRIREME_WITHOUT_PASSED"])


class _Recorder:
    """Writes each test's result to a file: "passed", or the plug-in that the test lacked."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._known.setdefault(report.nodeid, "passed")
        elif report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2]
            self._known[report.nodeid] = why.removeprefix(REASON) if REASON in why else ""
        elif not report.passed:
            self._known[report.nodeid] = ""

    def pytest_sessionfinish(self) -> None:
        _FILE.write_text(json.dumps({**_read(), **self._known}), encoding="utf-8")


def _read() -> dict[str, str]:
    known: dict[str, str] = json.loads(_FILE.read_text("utf-8")) if _FILE.exists() else {}
    return known


def pytest_configure(config: pytest.Config) -> None:
    """Registers the recorder in the main process, which receives the results of all tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that have passed, and those that lack the same plug-in again."""
    known = _read()
    left_out = [item for item in items if known.get(item.nodeid) in ("passed", *GONE)]
    items[:] = [item for item in items if known.get(item.nodeid) not in ("passed", *GONE)]
    config.hook.pytest_deselected(items=left_out)
