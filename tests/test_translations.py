"""A translated page that is older than its original is found."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

BUILD = Path(__file__).parent.parent / "docs" / "translations.py"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, for a project with one page and its translation."""
    spec = importlib.util.spec_from_file_location("docs_translations", BUILD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "docs" / "zh").mkdir(parents=True)
    (tmp_path / "page.md").write_text(
        "# A page\n<!-- generated: x -->\nold\n<!-- end: x -->\n", encoding="utf-8"
    )
    (tmp_path / "docs" / "zh" / "page.md").write_text(
        "<!-- translation of page.md at 000000000000 -->\n\n# 页面\n", encoding="utf-8"
    )
    return module


def test_a_translation_is_older_until_it_is_accepted(
    module: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "zh" / "page.md"
    assert module.main([]) == 1
    assert "docs/zh/page.md is older than page.md" in capsys.readouterr().out
    assert module.main(["--accept", str(page)]) == 0
    assert page.read_text(encoding="utf-8").endswith("\n\n# 页面\n")
    original = tmp_path / "page.md"
    text = original.read_text(encoding="utf-8")
    original.write_text(text.replace("old", "new"), encoding="utf-8")
    assert module.main([]) == 0  # what is generated does not count
    original.write_text(text.replace("A page", "Another page"), encoding="utf-8")
    assert module.main([]) == 1


def test_a_page_without_an_original_is_named(module: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "zh" / "page.md"
    (tmp_path / "page.md").unlink()
    (line,) = module.older()
    assert "page.md, which is not there any more" in line
    page.write_text("# 页面\n", encoding="utf-8")
    (line,) = module.older()
    assert "does not name its original" in line
    assert module.main(["--accept", str(page)]) == 2


def test_tables_are_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BUILD.parent))
    tables = importlib.import_module("chinese_tables")
    assert list(tables.regions())
    for _, region, write in tables.guide_tables.REGIONS:
        english, chinese = write(), tables.chinese(write)()
        number = r"\| ([\d,.]+) (?=\|)"
        assert re.findall(number, chinese) == re.findall(number, english), region
        assert tables.WORD.findall(english), region
        assert not tables.WORD.findall(chinese), region


def test_what_a_reader_types_is_the_same_in_both_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BUILD.parent))
    module = importlib.import_module("translations")
    for page in module.translations():
        stamp = module.STAMP.match(page.read_text(encoding="utf-8"))
        if not any(module.older([page])) and page.name != "index.md":
            assert typed(page) == typed(module.ROOT / stamp[1]), page


def typed(page: Path) -> list[str]:
    """Programs and commands of a page, without comments and docstrings."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:python|sh|\{code-cell\} bash)\n(.*?)^```$", text, re.M | re.S)
    shown = [block for block in blocks if "remove-cell" not in block]
    return [re.sub(r' *(#|""")[^\n]*', "", block) for block in shown]
