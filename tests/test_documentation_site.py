"""The documentation site has every page and every public name; `make docs` builds it."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import trireme
import trireme.data
import trireme.models
from trireme.session.options import Options

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REFERENCE = "\n".join(page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md"))


@pytest.fixture
def site_pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("site_pages")


@pytest.mark.parametrize("name", [*trireme.__all__, "MLP"])
def test_every_public_name_is_in_the_reference(name: str) -> None:
    if name in trireme.errors.__all__:
        assert "automodule:: trireme.errors\n   :members:" in REFERENCE
    elif hasattr(trireme.models, name):
        assert "automodule:: trireme.models\n   :members:" in REFERENCE
    else:
        assert re.search(rf"auto(class|function):: (trireme\.)?{name}$", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize("name", trireme.data.__all__)
def test_every_module_of_data_is_in_the_reference(name: str) -> None:
    assert f"automodule:: trireme.data.{name}\n   :members:" in REFERENCE


def test_help_explains_every_option_of_a_session_with_its_default() -> None:
    shown = explanations(trireme.Session)
    for option in dataclasses.fields(Options):
        default = re.match(r"\(default (.*?)\):", shown[option.name])
        assert default is not None, option.name
        if isinstance(option.default, (str, int, float)):
            assert default[1].strip('"') == str(option.default)


def explanations(documented: type) -> dict[str, str]:
    """What a docstring says of each argument or attribute."""
    entries = re.findall(
        r"^        (\w+)\b( \(default .*?\))?:(.*?)(?=^        \w|^\s*$)",
        documented.__doc__ or "",
        re.MULTILINE | re.DOTALL,
    )
    return {name: " ".join(f"{default}:{text}".split()) for name, default, text in entries}


def test_a_page_that_no_toctree_has_is_named(
    site_pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "docs" / "index.md"
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    index.write_text(
        "# T\n\n```{toctree}\n:glob:\n\na\nguides/*\nOverview <../README>\n```\n", "utf-8"
    )
    pages = [tmp_path / name for name in ("docs/a.md", "docs/guides/b.md", "README.md")]
    for page in pages:
        page.write_text("# P\n", "utf-8")
    monkeypatch.setattr(site_pages, "ROOT", tmp_path)
    monkeypatch.setattr(site_pages, "INDEX", index)
    assert site_pages.unlisted([index, *pages]) == []
    assert site_pages.unlisted([tmp_path / "docs" / "c.md"]) == [
        "docs/c.md is in no toctree: name it, or its folder, in docs/index.md"
    ]


def test_the_program_of_start_is_extracted_as_it_is_shown() -> None:
    ended = subprocess.run(
        [sys.executable, DOCS / "program.py", DOCS / "start.md"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0
    assert ended.stdout.startswith("import sys\n")
    assert ended.stdout in (DOCS / "start.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_site_is_built_from_scratch_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("myst_nb") is None:
        pytest.skip("needs trireme-train[docs]: `make docs` installs it")
    site = tmp_path / "html"
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-j", "2"]
    ended = subprocess.run(
        [*build, "-c", "docs", ".", site], cwd=ROOT, capture_output=True, text=True, timeout=1100
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    check = [sys.executable, DOCS / "site_checks.py", site]
    checked = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert checked.returncode == 0, checked.stderr
