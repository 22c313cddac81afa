"""The programs on the pages run, and their commands do what the pages say."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PYTHONPATH
from tests.docs.pages import ROOT, Page, pages
from tests.process_groups import free_ports
from trireme.cli.parser import COMMANDS

PAGES = [page for page in pages() if page.commands]
NAMES = [f"{page.path.parent.name}/{page.path.stem}" for page in PAGES]
OPTIONAL = ("accelerate", "lightning", "transformers", "torchvision")
_PORT = re.compile(r"localhost:(\d{4,5})")


def test_there_are_pages_and_programs() -> None:
    assert len(PAGES) >= 20
    assert sum(len(page.programs) for page in PAGES) >= 20


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.path.stem)
def test_programs_are_short_and_each_is_run_by_a_command_of_its_page(page: Page) -> None:
    for name, text in page.programs.items():
        ast.parse(text)
        assert max(map(len, text.splitlines())) <= 100, name
        assert any(name in block for block in page.commands), name


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_are_understood(page: Page) -> None:
    for line in "".join(page.commands).replace("\\\n", " ").splitlines():
        words = shlex.split(line.partition(" > ")[0], comments=True)
        if words[:1] != ["trireme"]:
            continue
        parser = COMMANDS[words[1]][0]()
        words = [word for word in words[2:] if word != "&"]
        if words and words[0] == "--help":
            continue
        if words and words[-1:] and parser.prog.split()[-1] in ("run", "task", "graph"):
            options, program = parser.split(words)
            parser.parse_args(options)
            name = program[0] if program else None
            assert name is None or name in page.programs or (ROOT / name).is_file(), line
        else:
            parser.read(words)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_page_runs_as_it_stands(page: Page, tmp_path: Path) -> None:
    text = "\n".join(page.programs.values())
    for package in OPTIONAL:
        if re.search(rf"^(from|import) {package}\b", text, re.MULTILINE):
            pytest.importorskip(package)
    run(page, tmp_path)


@pytest.mark.thorough
@pytest.mark.processes
def test_the_first_page_for_programs_of_tensorflow_runs(tmp_path: Path) -> None:
    run(PAGES[NAMES.index("from_tensorflow/cluster")], tmp_path)


def run(page: Page, directory: Path) -> None:
    """Runs each block of a page's commands, in its order."""
    for name, text in page.programs.items():
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "examples").symlink_to(ROOT / "examples")
    environ = {name: value for name, value in os.environ.items() if name != "TRIREME_TASK"}
    environ |= {
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CONFIG_HOME": str(directory / "config"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]]),
    }
    for block in elsewhere(page.commands):
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=directory,
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, f"{block}\n{ended.stdout}\n{ended.stderr}"


def elsewhere(blocks: list[str]) -> list[str]:
    """Returns commands with ports that are free here instead of those on the page."""
    named = sorted({port for block in blocks for port in _PORT.findall(block)})
    ports = dict(zip(named, free_ports(len(named)), strict=True))
    return [_PORT.sub(lambda found: f"localhost:{ports[found[1]]}", block) for block in blocks]
