"""Skips the cases of a plug-in in tests of the core, where it is not installed.

A case is skipped if it fails by the error that a part of Trireme is not installed, or by the import
of a module of that part, and its file or its name names what the part adds. Any other failure stays
one, as does one of a test that names nothing of the part: the core needs it there, and must not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import Any

import pytest

_WORDS = os.environ["TRIREME_WITHOUT"].split()
_NAMES = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in _WORDS))
_MODULES = "|".join(re.escape(word) for word in _WORDS if word.startswith("trireme."))
_MISSING = re.compile(rf"is in a plug-in that is\s+not installed|No module named '({_MODULES})\b")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns such a failure into a skip."""
    report = yield
    said = [str(report.longrepr), *(text for _, text in report.sections)]
    if report.failed and _MISSING.search(" ".join(" ".join(said).split())):
        text = item.path.read_text(encoding="utf-8")
        if _NAMES.search(item.nodeid) or _NAMES.search(text):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, "a case of a plug-in that is not installed")
    return report
