"""What people install: the distribution's name, and what pages and messages tell them to type."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OTHERS = re.compile(r"""pip install [^`\n]*?['"]?\btrireme(?![-_./\w])""")
"""Installs the abandoned program that has the name `trireme` on the package index."""
ASKED_FOR = re.compile(r"""['"]([a-z][a-z-]*>=[0-9.]+)['"]""")


def texts() -> dict[Path, str]:
    """What users read: every page, message, and example."""
    files = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(path for part in ("trireme", "examples", "benchmarks") for path in
          (ROOT / part).rglob("*.py")),
    ]  # fmt: skip
    return {path: path.read_text(encoding="utf-8") for path in files}


def test_the_distribution_is_not_the_one_that_has_the_name_already() -> None:
    assert PROJECT["name"] == "trireme-train"
    assert list(PROJECT["scripts"]) == ["trireme"]


def test_no_page_and_no_message_says_to_install_the_other_program() -> None:
    warned = "`pip install trireme` installs another"
    chinese = "`pip install trireme` 装的是另一个"
    for path, text in texts().items():
        assert not (found := OTHERS.search(text.replace(warned, "").replace(chinese, ""))), (
            f"{path}: {found}"
        )
    assert warned in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_messages_say_to_install_is_what_the_extras_ask_for() -> None:
    known = {
        requirement.split("<")[0].split(",")[0]
        for requirements in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
        for requirement in requirements
    }
    said = 0
    for path, text in texts().items():
        for line in text.splitlines():
            if "pip install" in line:
                for requirement in ASKED_FOR.findall(line):
                    said += 1
                    assert requirement in known, f"{path}: {line.strip()}"
    assert said >= 3  # in the core
