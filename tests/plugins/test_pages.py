"""The pages of docs/extending show the packages of this folder, word by word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.installed import HERE, KINDS, ROOT


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_shows_the_very_package(kind: str) -> None:
    page = (ROOT / "docs" / "extending" / f"{kind}.md").read_text(encoding="utf-8")
    files = [path for path in sorted((HERE / kind).iterdir()) if path.is_file()]
    assert {path.suffix for path in files} == {".toml", ".py"}
    for path in files:
        language = {".toml": "toml", ".py": "python"}[path.suffix]
        block = f"```{language}\n{path.read_text(encoding='utf-8')}```\n"
        assert block in page, f"{path} is not on the page as it is"
    assert f"extending/{kind}.md" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_has_at_most_eighty_lines(kind: str) -> None:
    lines = [line for path in Path(HERE / kind).glob("*.*") for line in path.open()]
    assert len(lines) <= 80
