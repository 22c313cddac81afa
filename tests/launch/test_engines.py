"""Options that engines and hooks have, and the engine of this host alone has not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.conftest import PYTHONPATH
from tests.metadata import forget, write_metadata
from trireme.cli.command import COMMANDS
from trireme.errors import ConfigurationError, UsageError
from trireme.launch.config.sources import read_config
from trireme.launch.engines import ENGINES, EngineType, all_options, check_engine, engine_options
from trireme.launch.hooks import RESERVED, launched_hooks


def test_this_host_is_an_engine_without_options() -> None:
    assert "local" in ENGINES
    assert "local" not in {option.engine for option in all_options()}
    check_engine(read_config({"on": "local", "workers": "2"}, {}, None))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allow_plaintext": "yes"}, "all tasks of this one are on this host: leave it out"),
        ({"certs": "here"}, "for tasks on several hosts and with --tls; leave it out"),
        (
            {"on": "locl"},
            r"on is locl \(command line\): there is no engine locl \(did you mean local",
        ),
    ],
)
def test_what_contradicts_an_engine_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_engine(read_config(given, {}, None))


def test_an_option_of_an_engine_without_a_default_is_refused_where_the_engine_is_made() -> None:
    class Options(msgspec.Struct, kw_only=True):
        command: str

    with pytest.raises(TypeError, match=r"Options.command has no default"):
        EngineType("through a command", "none:run", Options)


ENGINE = """
from typing import Annotated
import msgspec
from trireme.job_config import Option
from trireme.launch.engines import EngineType
class Options(msgspec.Struct, frozen=True, kw_only=True):
    {field}: Annotated[str, Option("X", "an option of its own")] = "none"
ONE = EngineType("elsewhere", "{module}:run", Options, one_host=True)
def run(job, directory, console):
    from trireme.launch.engines import engine_options
    print("runs with", engine_options(job.task.config, Options).{field})
    return 0
"""
HOOK = """
from trireme.job_config import Option
from trireme.launch.hooks import LaunchHook
ONE = LaunchHook(Option("X", "a hook of its own", type=str), "builtins:str")
"""


def install(folder: Path, kind: str, name: str, field: str = "") -> str:
    """Installs a package with one engine or hook; returns how errors name it."""
    module = dist = f"of_{kind}_{name.replace('-', '_0')}"
    code = (ENGINE if kind == "engine" else HOOK).format(field=field, module=module)
    (folder / f"{module}.py").write_text(code)
    write_metadata(folder, dist, points=f"[trireme.{kind}s]\n{name} = {module}:ONE\n")
    return f"the {kind} {name} of {dist} 1.5, {module}:ONE, has an option "


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where packages are installed."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    monkeypatch.undo()
    forget()
    for name in [name for name in sys.modules if name.startswith("of_")]:
        del sys.modules[name]


def test_an_engine_may_have_a_hyphen_in_its_name(folder: Path) -> None:
    install(folder, "engine", "my-cluster", "queue")
    words = ["--on", "my-cluster", "--my-cluster-queue", "long", "program.py"]
    parser = COMMANDS.load("run").parser()
    given = vars(parser.parse_args(parser.split(words)[0]))
    config = read_config(given, {}, None)
    check_engine(config)
    kind = ENGINES.load("my-cluster").options
    assert engine_options(config, kind).queue == "long"  # type: ignore[attr-defined]
    config = read_config({"on": "my-cluster"}, {"TRIREME_MY_CLUSTER_QUEUE": "short"}, None)
    assert engine_options(config, kind).queue == "short"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "field", "owner"),
    [
        ("run", "dir", "--run-dir, which Trireme itself has already"),
        ("replicas", "to_aggregate", "--replicas-to-aggregate, which Trireme itself"),
        ("dry", "run", "--dry-run, which Trireme itself has already"),
        ("a_b", "c", "--a-b-c, which the engine a of of_engine_a 1.5 has already"),
        ("some", "hook", "--some-hook, which the hook some-hook of of_hook_some_0hook 1.5 has"),
    ],
)
def test_an_engine_with_an_option_that_is_there_is_refused_where_it_is_used(
    folder: Path, name: str, field: str, owner: str
) -> None:
    install(folder, "engine", "a", "b_c")
    install(folder, "hook", "some-hook")
    said = install(folder, "engine", name, field)
    names = [name for option in all_options() for name in option.names]
    assert len(names) == len({*names})
    helped = COMMANDS.load("run").parser().format_help()
    assert "--a-b-c X" in helped and f"{name}: elsewhere" in " ".join(helped.split())
    check_engine(read_config({"on": "a", "a_b_c": "1", "run_dir": "there"}, {}, None))
    with pytest.raises(ConfigurationError) as refused:
        check_engine(read_config({"on": name}, {}, None))
    assert str(refused.value).startswith(said + owner)


def test_a_hook_whose_option_is_there_is_refused_where_that_is_given(folder: Path) -> None:
    said = install(folder, "hook", "run-dir")
    install(folder, "hook", "task")
    install(folder, "hook", "a-b")
    config = read_config({"workers": "2", "a_b": "1", "dry_run": None}, {}, None)
    assert launched_hooks(config) == ("1",)
    twice = install(folder, "hook", "a_b")
    with pytest.raises(ConfigurationError) as refused:
        read_config({"a_b": "1"}, {}, None)
    assert str(refused.value).startswith(
        f"{twice}--a-b, which the hook a-b of of_hook_a_0b 1.5 has"
    )
    for where in ({"run_dir": "x"}, {}), ({}, {"TRIREME_RUN_DIR": "x"}):
        with pytest.raises(ConfigurationError) as refused:
            read_config(*where, None)
        assert str(refused.value).startswith(said + "--run-dir, which Trireme itself has")
    with pytest.raises(ConfigurationError, match="--task, which Trireme itself has already"):
        COMMANDS.load("run").parser().split(["--task", "1", "program.py"])


def test_no_option_of_a_plugin_takes_the_place_of_a_commands_own() -> None:
    for command in {"run", "task"} & {*COMMANDS}:
        parser = COMMANDS.load(command).parser()
        named = {each[2:] for action in parser.arguments for each in action.option_strings}
        options = {name for option in all_options() for name in option.names}
        assert named - {""} <= options | {*RESERVED}


def test_a_user_is_told_which_package_has_an_option_that_is_there(folder: Path) -> None:
    said = install(folder, "engine", "run", "dir")
    install(folder, "engine", "my-cluster", "queue")
    (folder / "program.py").touch()

    def trireme(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "trireme", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), PYTHONPATH])},
            capture_output=True,
            text=True,
            timeout=60,
        )

    helped = trireme("run", "--help")
    assert helped.returncode == 0 and "--my-cluster-queue X" in helped.stdout
    ran = trireme("run", "--on", "my-cluster", "--my-cluster-queue", "long", "program.py")
    assert ran.stdout == "runs with long\n", ran.stderr
    wrong = trireme("run", "--on", "run", "program.py")
    (line,) = wrong.stderr.splitlines()
    assert line.startswith(f"trireme: error: {said}--run-dir, which Trireme itself has already")
