"""Skips the cases of a plug-in in tests of the core, where it is not installed.

A case is skipped if it fails by the error that a part of Trireme is not installed, or by the import
of a module of that part, and its file or its name names what the part adds. Any other failure stays
one, as does one of a test that names nothing of the part: the core needs it there, and must not.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator
from typing import Any

import pytest

GONE: dict[str, list[str]] = json.loads(os.environ["TRIREME_WITHOUT"])
"""The modules and the words of each plug-in that is not installed."""

REASON = "a case of a plug-in that is not installed: "

_WORDS = [word for words in GONE.values() for word in words]
_NAMES = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in _WORDS))
_MODULES = {word: name for name in GONE for word in GONE[name] if word.startswith("trireme.")}
_MISSING = re.compile(
    r"is in a plug-in that is not installed here(?:: pip install 'trireme-train\[(?P<extra>\w+))?"
    rf"|No module named '(?P<module>{'|'.join(map(re.escape, _MODULES))})\b"
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns such a failure into a skip."""
    report = yield
    said = [str(report.longrepr), *(text for _, text in report.sections)]
    if report.failed and (missing := _MISSING.search(" ".join(" ".join(said).split()))):
        text = item.path.read_text(encoding="utf-8")
        if _NAMES.search(item.nodeid) or _NAMES.search(text):
            name = missing["extra"] or _MODULES.get(missing["module"], "")
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"{REASON}{name}")
    return report
