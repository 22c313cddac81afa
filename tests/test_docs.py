"""The pages say what is built, and their links lead somewhere."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from tests.metadata import forget
from trireme import plugins
from trireme.cli.command import COMMANDS
from trireme.cluster.messages import CLUSTER_MESSAGES
from trireme.job_config import STRATEGIES
from trireme.launch.engines import ENGINES
from trireme.ps.replication.messages import PS_MESSAGES
from trireme.wire.handshake import Challenge, Denied, Hello, Proof, Welcome

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "docs" / "build.py"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BUILD.parent))
    spec = importlib.util.spec_from_file_location("docs_build", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
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


@pytest.mark.parametrize("missing", ["", "ray"])
def test_the_page_does_not_depend_on_what_is_installed(
    build, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_missing", lambda point: point.extras and missing)
    forget()
    page = build.command_line_page()
    monkeypatch.undo()
    forget()
    assert "| `--on ENGINE` | where tasks run: local: this host; ray: the nodes of a Ray" in page
    assert page == build.command_line_page()


def test_every_message_is_on_the_page(build) -> None:
    page = build.messages()
    handshake = (Hello, Challenge, Proof, Welcome, Denied)
    for message in (*handshake, *CLUSTER_MESSAGES, *PS_MESSAGES):
        assert f"| {message.kind} | `{message.__name__}` | " in page
    assert "| 64 | `Attach` | `" in page


def test_a_changed_region_is_seen_and_the_rest_of_the_page_stays(build) -> None:
    page = "before\n<!-- generated: x -->old<!-- end: x -->\nafter\n"
    written = build.with_region(page, "x", "new")
    assert written == "before\n<!-- generated: x -->\n\nnew\n\n<!-- end: x -->\nafter\n"
    assert build.with_region(written, "x", "new") == written
    with pytest.raises(ValueError, match="no region y"):
        build.with_region(page, "y", "new")


def test_every_package_is_in_the_layout(build) -> None:
    folders = build.layout()
    for path in (ROOT / "trireme").glob("*/__init__.py"):
        assert f"  {path.parent.name}/ " in folders
    assert "shard.py" not in folders


def test_a_struct_is_a_row_with_its_fields_and_the_first_sentence_about_it(build) -> None:
    class Thing(msgspec.Struct, array_like=True):
        """A thing. It is good."""

        a: int | None
        b: str = "x"

    assert build.struct_row(Thing) == "| `Thing` | `a, b?` | A thing |"


@pytest.mark.thorough
@pytest.mark.processes
def test_the_program_on_the_front_page_runs_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert program is not None
    (tmp_path / "program.py").write_text(program[1], encoding="utf-8")
    command = [sys.executable, "program.py"]
    environ = {name: value for name, value in os.environ.items() if name != "TRIREME_TASK"}
    environ["PYTHONPATH"] = str(ROOT)
    ended = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    accuracy = re.search(r"'accuracy': ([\d.]+)", ended.stdout)
    assert accuracy is not None, ended.stdout
    assert float(accuracy[1]) > 0.95
    assert (tmp_path / "runs" / "digits" / "checkpoints" / "step-000002000-writer-1").is_dir()


def test_the_tests_that_the_page_of_faults_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs" / "faults.md").read_text("utf-8"))
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists()] == []


def commands() -> list[str]:
    """Every command of ours in the pages that is there to be typed."""
    found: list[str] = []
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            found += [line for line in block.splitlines() if line.startswith("trireme ")]
    return [line for line in found if not re.search(r"\.\.\.|[…|[]| [A-Z]+$", line)]


def test_the_commands_in_the_pages_are_understood() -> None:
    assert len(commands()) >= 6
    for line in commands():
        name, *words = shlex.split(line, comments=True)[1:]
        if "ray" in words and "ray" not in ENGINES:
            continue  # it has no options where it is not installed
        parser = COMMANDS.load(name).parser()
        if name in ("run", "task", "slurm"):
            options, program = parser.split(words[1:] if name == "slurm" else words)
            parser.parse_args(options)
            assert not program or program[0] == "digits.py" or (ROOT / program[0]).is_file()
        else:
            parser.read(words)


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_strategies_that_are_built_have_a_page(name: str) -> None:
    assert f"| `{name}`" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"## {name}" in (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    for requirement in (*project["dependencies"], *(r for extra in extras for r in extra)):
        name = re.match(r"[\w-]+", requirement)
        assert name is not None
        assert f"| {name[0]} |" in page


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


def test_the_table_of_sizes_knows_where_each_plug_in_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BUILD.parent))
    size = importlib.import_module("size")
    paths = [path for path, _ in size.sources()]
    for beginnings in size.PLUGINS.values():
        for beginning in beginnings:
            assert any(path.startswith(beginning) for path in paths), beginning
    assert size.part_of("graph/capture/capture.py") == "graph"
    assert size.part_of("ps/shard/shard.py") == size.part_of("plugins.py") == "core"
    assert any(line.startswith("all words") for line in size.word_table())
