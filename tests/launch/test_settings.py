from __future__ import annotations

import re
from pathlib import Path

import pytest

from trireme.errors import ConfigurationError, UsageError
from trireme.launch.settings import OPTIONS, OTHER_VARIABLES, check_together, read_file, resolve


def test_the_command_line_comes_first_then_environment_then_file_then_default() -> None:
    environ = {"TRIREME_PS": "2", "TRIREME_WORKERS": "2"}
    file = ("trireme.toml", {"ps": "3", "workers": "3", "max-restarts": "3"})
    settings = resolve({"workers": "1"}, environ, file)
    assert (settings["workers"], settings.origins["workers"]) == (1, "command line")
    assert (settings["ps"], settings.origins["ps"]) == (2, "environment TRIREME_PS")
    assert (settings["max-restarts"], settings.origins["max-restarts"]) == (3, "file trireme.toml")
    assert (settings["join-timeout"], settings.origins["join-timeout"]) == (300.0, "default")
    assert set(settings.values) == {option.name for option in OPTIONS}


def test_an_empty_variable_is_none() -> None:
    assert resolve({}, {"TRIREME_PS": ""}, None).origins["ps"] == "default"


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
    ],
)
def test_a_bad_value_is_named_with_its_origin(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} is '{text}' \(command line\): it must be"):
        resolve({name: text}, {}, None)


def test_strategies() -> None:
    assert resolve({"strategy": "ssp"}, {}, None)["strategy"] == "ssp"
    with pytest.raises(
        UsageError, match=r"did you mean sync\?.*async, ssp, sync.*TRIREME_STRATEGY"
    ):
        resolve({}, {"TRIREME_STRATEGY": "sinc"}, None)
    with pytest.raises(UsageError, match="graph is not built yet; those that are: async"):
        resolve({"strategy": "graph"}, {}, None)


def test_lines_show_value_and_origin() -> None:
    lines = resolve({"ps": "1"}, {}, None).lines()
    assert len(lines) == len(OPTIONS)
    assert lines[1].split() == ["ps", "1", "command", "line"]
    assert lines[2].split() == ["strategy", "-", "default"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": "2", "strategy": "ssp"}, "add --ps 1, or use --strategy allreduce"),
        ({"ps": "1", "strategy": "pipeline"}, "has no parameter servers"),
        ({"ps": "1", "strategy": "sync", "every": "4"}, "add --strategy averaging"),
        ({"ps": "1", "aggregate": "1"}, "add --strategy sync"),
        ({"ps": "1", "aggregate": "1", "strategy": "async"}, "add --strategy sync"),
        ({"ps": "1", "aggregate": "2", "strategy": "sync"}, "there are only 1 workers"),
        ({"ps": "1", "staleness": "1", "strategy": "sync"}, "add --strategy ssp"),
        ({"ps": "1", "aggregate": "1", "strategy": "averaging"}, "only the strategies sync"),
        ({"ps": "1", "staleness": "1", "strategy": "diloco"}, "only the strategies ssp and averag"),
        ({"ps": "1", "every": "4", "strategy": "sync"}, "add --strategy averaging"),
        ({"workers": "2", "strategy": "diloco"}, "needs a parameter server: add --ps 1"),
    ],
)
def test_what_contradicts_itself_is_refused(given: dict[str, str], message: str) -> None:
    settings = resolve(given, {}, None)
    with pytest.raises(UsageError, match=message):
        check_together(settings, settings["workers"], settings["ps"])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"workers": "3", "ps": "1", "strategy": "sync", "aggregate": "2"},
        {"workers": "3", "ps": "1", "strategy": "ssp", "staleness": "2"},
        {"workers": "3", "ps": "1", "strategy": "diloco", "every": "50", "aggregate": "2"},
        {"workers": "3", "ps": "1", "strategy": "averaging", "staleness": "2"},
    ],
)
def test_what_makes_sense_passes(given: dict[str, str]) -> None:
    settings = resolve(given, {}, None)
    check_together(settings, settings["workers"], settings["ps"])


def test_reads_the_files_of_the_directory(tmp_path: Path) -> None:
    assert read_file(None, tmp_path) is None
    (tmp_path / "pyproject.toml").write_text("[tool.trireme]\nmax_restarts = 2\n")
    assert read_file(None, tmp_path) == ("pyproject.toml", {"max-restarts": "2"})
    (tmp_path / "trireme.toml").write_text('workers = "auto"\nps = 1\n')
    assert read_file(None, tmp_path) == ("trireme.toml", {"workers": "auto", "ps": "1"})
    named = tmp_path / "other.toml"
    named.write_text("ps = 2\n")
    assert read_file(named, tmp_path) == (str(named), {"ps": "2"})


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
        read_file(tmp_path / "missing.toml", tmp_path)


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
        resolve({}, {name: "2"}, None)


def test_variables_that_are_ours_or_somebody_else_s_pass() -> None:
    own = {option.variable: "" for option in OPTIONS} | dict.fromkeys(OTHER_VARIABLES, "x")
    others = {"TRIREME_DATA": "/data", "TRIREME_INTEGRATION_TEST": "1", "WORKRS": "3"}
    assert resolve({}, own | others, None)["workers"] == 1


def test_every_variable_that_the_package_reads_is_known() -> None:
    import trireme

    known = {*OTHER_VARIABLES, *(option.variable for option in OPTIONS)}
    for path in Path(trireme.__file__).parent.rglob("*.py"):
        for name in re.findall(r"\bTRIREME_[A-Z][A-Z_]*", path.read_text(encoding="utf-8")):
            assert name in known, f"{path} names {name}"
