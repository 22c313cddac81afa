from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from trireme.errors import ConfigurationError, UsageError
from trireme.job_config import OPTIONS, JobConfig
from trireme.launch.config.sources import OTHER_VARIABLES, read_config, read_file


def test_the_command_line_comes_first_then_environment_then_file_then_default() -> None:
    environ = {"TRIREME_PS": "2", "TRIREME_WORKERS": "2"}
    file = ("trireme.toml", {"ps": "3", "workers": "3", "max_restarts": "3"})
    config = read_config({"workers": "1"}, environ, file)
    assert (config.tasks.workers, config.origin("workers")) == (1, "command line")
    assert (config.tasks.ps, config.origin("ps")) == (2, "environment TRIREME_PS")
    assert (config.launch.max_restarts, config.origin("max_restarts")) == (3, "file trireme.toml")
    assert (config.timeouts.join_timeout, config.origin("join_timeout")) == (300.0, "default")
    assert set(config.values) == {option.name for option in OPTIONS}


def test_an_empty_variable_is_none() -> None:
    assert read_config({}, {"TRIREME_PS": ""}, None).origin("ps") == "default"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("workers", "0"),
        ("workers", "many"),
        ("workers", "2.5"),
        ("ps", "-1"),
        ("aggregate", "0"),
        ("staleness", "0"),
        ("max-restarts", "-1"),
        ("join-timeout", "0"),
        ("join-timeout", "nan"),
        ("join-timeout", "inf"),
        ("progress-timeout", "-1"),
        ("metrics-port", "65536"),
        ("compress", "fp61"),
        ("schedule", "none"),
    ],
)
def test_a_bad_value_is_named_with_its_origin(name: str, text: str) -> None:
    field = name.replace("-", "_")
    with pytest.raises(UsageError, match=rf"{name} is '{text}' \(command line\): it must be"):
        read_config({field: text}, {}, None)


def test_strategies() -> None:
    assert read_config({"strategy": "ssp"}, {}, None).training.strategy == "ssp"
    with pytest.raises(
        UsageError, match=r"'sinc' \(environment TRIREME_STRATEGY\).*ssp, sync.*mean sync\?"
    ):
        read_config({}, {"TRIREME_STRATEGY": "sinc"}, None)


def test_lines_show_value_and_origin() -> None:
    lines = read_config({"ps": "1"}, {}, None).lines(OPTIONS)
    assert len(lines) == len(OPTIONS)
    assert lines[1].split() == ["ps", "1", "command", "line"]
    assert lines[3].split() == ["strategy", "-", "default"]


@pytest.mark.parametrize(
    ("text", "value"), [("yes", True), ("No", False), ("TRUE", True), ("0", False)]
)
def test_a_switch_has_a_few_words(text: str, value: bool) -> None:
    assert read_config({}, {"TRIREME_PREFETCH": text}, None).training.prefetch is value
    with pytest.raises(UsageError, match=r"prefetch is 'maybe' .*: it must be yes or no"):
        read_config({"prefetch": "maybe"}, {}, None)


def test_a_configuration_travels_whole() -> None:
    given = {"workers": "auto", "mesh": "tp=2", "prefetch": "yes", "join_timeout": "2.5"}
    config = read_config(given, {}, None)
    assert msgspec.json.decode(msgspec.json.encode(config), type=JobConfig) == config


def test_reads_the_files_of_the_directory(tmp_path: Path) -> None:
    assert read_file(None, tmp_path) is None
    (tmp_path / "pyproject.toml").write_text("[tool.trireme]\nmax_restarts = 2\n")
    assert read_file(None, tmp_path) == ("pyproject.toml", {"max_restarts": "2"})
    (tmp_path / "trireme.toml").write_text('workers = "auto"\nps = 1\n')
    assert read_file(None, tmp_path) == ("trireme.toml", {"workers": "auto", "ps": "1"})
    named = tmp_path / "other.toml"
    named.write_text("ps = 2\n")
    assert read_file(str(named), tmp_path) == (str(named), {"ps": "2"})


def test_a_project_without_our_table_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert read_file(None, tmp_path) is None


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "trireme.toml"
    file.write_text("worker = 2\n")
    with pytest.raises(ConfigurationError, match=r"sets worker.*did you mean workers\?"):
        read_file(None, tmp_path)
    file.write_text("workers = \n")
    with pytest.raises(ConfigurationError, match=r"trireme.toml cannot be read"):
        read_file(None, tmp_path)
    with pytest.raises(ConfigurationError, match=r"missing.toml cannot be read"):
        read_file(str(tmp_path / "missing.toml"), tmp_path)
    for text in (f"ps = {'9' * 10_000}\n", f"a = {'[' * 100_000}\n"):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=r"trireme.toml cannot be read"):
            read_file(None, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match=r"pipe cannot be read: it is not a regular file"):
        read_file(str(tmp_path / "pipe"), tmp_path)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TRIREME_WORKRS", "TRIREME_WORKERS"),
        ("TRIREME_WORKER", "TRIREME_WORKERS"),
        ("TRIREME_MAXRESTARTS", "TRIREME_MAX_RESTARTS"),
        ("TRIREME_STRATGEY", "TRIREME_STRATEGY"),
        ("TRIREME_SECRETS", "TRIREME_SECRET"),
    ],
)
def test_a_misspelt_variable_is_refused_with_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"sets {name}, .*\(did you mean {meant}\?\)"):
        read_config({}, {name: "2"}, None)


def test_variables_that_are_ours_or_somebody_else_s_pass() -> None:
    own = {option.variable: "" for option in OPTIONS} | dict.fromkeys(OTHER_VARIABLES, "x")
    others = {"TRIREME_DATA": "/data", "TRIREME_INTEGRATION_TEST": "1", "WORKRS": "3"}
    assert read_config({}, own | others, None).tasks.workers == 1


def test_every_variable_that_the_package_reads_is_known() -> None:
    import trireme

    known = {*OTHER_VARIABLES, *(option.variable for option in OPTIONS)}
    for path in Path(trireme.__file__).parent.rglob("*.py"):
        for name in re.findall(r"\bTRIREME_[A-Z][A-Z_]*", path.read_text(encoding="utf-8")):
            assert name in known, f"{path} names {name}"
