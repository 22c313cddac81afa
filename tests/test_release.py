from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.release import problems, steps

ROOT = Path(__file__).parent.parent
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-12-01\n"


def test_nothing_stands_in_the_way_of_a_release() -> None:
    assert problems("0.1.0", CHANGELOG, "", "", "abc") == []
    assert problems("0.1.0", CHANGELOG, "", "abc", "abc") == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("0.1.0.dev0", CHANGELOG, "", "", "abc"), "the version is 0.1.0.dev0"),
        (("0.2.0", CHANGELOG, "", "", "abc"), "CHANGELOG.md has no section 0.2.0"),
        (("0.1.0", CHANGELOG, " M README.md\n", "", "abc"), "not committed:\n M README.md"),
        (("0.1.0", CHANGELOG, "", "def", "abc"), "the tag v0.1.0 is of another commit, def"),
    ],
)
def test_what_stands_in_the_way_is_named(
    given: tuple[str, str, str, str, str], message: str
) -> None:
    assert any(message in problem for problem in problems(*given))


def test_a_person_tags_and_uploads() -> None:
    typed = steps("0.1.0", ["dist/a.whl", "dist/a.tar.gz"], tagged=False)
    assert typed[:2] == ["git tag -a v0.1.0 -m 'Trireme 0.1.0'", "git push origin v0.1.0"]
    assert typed[-1].startswith("python -m twine upload dist/a.whl dist/a.tar.gz")
    assert not steps("0.1.0", [], tagged=True)[0].startswith("git tag")


def test_an_index_that_cannot_be_reached_is_said_before_anything_is_installed(
    tmp_path: Path,
) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        index = f"http://127.0.0.1:{closed.getsockname()[1]}/whl/cpu"
    words = ["make", "venv", f"PIP_EXTRA_INDEX_URL={index}", "PIP_NO_INDEX=1"]
    environ = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    ended = subprocess.run(
        words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert f"make: {index} cannot be reached within 10 s" in ended.stderr
    assert "leave PIP_EXTRA_INDEX_URL out" in ended.stderr
    assert not (tmp_path / ".venv").exists()
