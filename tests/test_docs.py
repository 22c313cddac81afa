"""The pages say what is built, and their links lead somewhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).parent.parent / "docs" / "build.py"


@pytest.fixture
def build():
    spec = importlib.util.spec_from_file_location("docs_build", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date_and_links_lead_somewhere() -> None:
    ended = subprocess.run(
        [sys.executable, BUILD, "--check"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


def test_every_option_is_on_the_page(build) -> None:
    page = build.command_line_page()
    for word in ("--replicas-to-aggregate R", "TRIREME_MAX_RESTARTS", "trireme checkpoint"):
        assert word in page
    assert "--tied-to" not in page


def test_broken_links_are_found(build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "b.md").write_text("# Two words, `code`\n")
    (tmp_path / "a.md").write_text(
        "[x](docs/b.md#two-words-code) [y](https://example.org) `[z](no)`\n"
        "```\n[code](no.md)\n```\n"
    )
    assert build.broken_links() == []
    (tmp_path / "a.md").write_text("[x](docs/c.md) [y](docs/b.md#three)")
    assert build.broken_links() == [
        "a.md: docs/c.md leads to no file",
        "a.md: docs/b.md#three leads to no heading",
    ]
