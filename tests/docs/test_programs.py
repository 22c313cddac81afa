"""The programs on the pages run, and their commands do what the pages say."""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import free_ports
from tests.conftest import PYTHONPATH
from tests.docs.pages import ROOT, Page, pages
from trireme.cli.command import COMMANDS

PAGES = [page for page in pages() if page.commands]
NAMES = [f"{page.path.parent.name}/{page.path.stem}" for page in PAGES]
OPTIONAL = ("accelerate", "torchvision")
_PORT = re.compile(r"localhost:(\d{4,5})")


def test_there_are_pages_and_programs() -> None:
    assert len(PAGES) >= 14
    assert sum(len(page.programs) for page in PAGES) >= 16


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.path.stem)
def test_programs_are_short_and_each_is_run_by_a_command_of_its_page(page: Page) -> None:
    for name, text in page.programs.items():
        ast.parse(text)
        assert max(map(len, text.splitlines())) <= 100, name
        assert any(name in block for block in page.commands), name


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_are_understood(page: Page) -> None:
    for line in "".join(page.commands).replace("\\\n", " ").splitlines():
        words = shlex.split(re.split(r" (?:>|&|\|\|?)( |$)", line)[0], comments=True)
        if words[:1] != ["trireme"]:
            continue
        parser = COMMANDS.load(words[1]).parser()
        if words[1] not in ("run", "task", "graph"):
            parser.read(words[2:])
            continue
        options, program = parser.split(words[2:])
        parser.parse_args(options)
        for name in program[:1]:
            assert name in page.programs or (ROOT / name).is_file(), line


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_differences_are_those_of_the_programs(page: Page) -> None:
    for name in page.programs:
        if name.endswith("_before.py"):
            before, after = (
                page.programs[each].splitlines()[1:]
                for each in (name, name.replace("_before", "_after"))
            )
            lines = difflib.unified_diff(before, after, n=0, lineterm="")
            changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
            assert "\n".join(["```diff", *changed, "```"]) in page.path.read_text(encoding="utf-8")


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
def test_every_program_runs_in_one_process(tmp_path: Path) -> None:
    programs: dict[str, list[str]] = {}
    for page in PAGES:
        for name, text in page.programs.items():
            if re.search(
                rf"^(from|import) ({'|'.join(OPTIONAL)})\b|init_process_group", text, re.M
            ):
                continue
            command = re.search(rf"{name}( \d+)?", "".join(page.commands))
            assert command is not None
            (tmp_path / name).write_text(text, encoding="utf-8")
            programs[name] = command[0].split()
    programs.pop("serving.py")  # it reads what another command of its page has written
    ended = subprocess.run(
        [sys.executable, Path(__file__).with_name("run_all.py"), json.dumps([*programs.values()])],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def run(page: Page, directory: Path) -> None:
    """Runs each block of a page's commands, in its order."""
    for name, text in page.programs.items():
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "examples").symlink_to(ROOT / "examples")
    for block in elsewhere(page.commands):
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=directory,
            env=environment(directory),
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert ended.returncode == 0, f"{block}\n{ended.stdout}\n{ended.stderr}"


def environment(directory: Path) -> dict[str, str]:
    """Returns the environment of a reader who works in a directory."""
    environ = {name: value for name, value in os.environ.items() if name != "TRIREME_TASK"}
    return environ | {
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CONFIG_HOME": str(directory / "config"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]]),
    }


def elsewhere(blocks: list[str]) -> list[str]:
    """Returns commands with ports that are free here instead of those on the page."""
    named = sorted({port for block in blocks for port in _PORT.findall(block)})
    ports = dict(zip(named, free_ports(len(named)), strict=True))
    return [_PORT.sub(lambda found: f"localhost:{ports[found[1]]}", block) for block in blocks]
