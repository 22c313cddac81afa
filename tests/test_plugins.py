"""What `trireme.plugins` says of packages that are installed, missing, broken or two of a name."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points, metadata
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.conftest import ROOT
from tests.metadata import forget, write_metadata
from trireme import plugins
from trireme.cli.command import Command
from trireme.cli.parser import RUN
from trireme.errors import ConfigurationError, UsageError
from trireme.plugins import Plugins

Install = Callable[..., None]

COMMANDS = Plugins("trireme.commands", "command", Command)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with one entry point; its module has the name of its entry point."""
    monkeypatch.syspath_prepend(tmp_path)

    def installed(dist: str, point: str, code: str, requires: str = "") -> None:
        (tmp_path / f"{dist}_module.py").write_text(code)
        more = f"Provides-Extra: more\nRequires-Dist: {requires}\n" if requires else ""
        value = f"{dist}_module:ONE{' [more]' if requires else ''}"
        points = f"[trireme.commands]\n{point} = {value}\n"
        write_metadata(tmp_path, dist, points=points, more=more)

    yield installed
    monkeypatch.undo()
    forget()
    for name in [name for name in sys.modules if name.endswith("_module")]:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


GOOD = """
from trireme.cli.command import Command
ONE = Command("do one thing", lambda: None, "none:main")
"""


def test_what_a_package_adds_is_found_beside_our_own(install: Install) -> None:
    before = COMMANDS.names()
    install("adder", "one", GOOD)
    assert COMMANDS.names() == sorted([*before, "one"])
    assert "one" in COMMANDS
    assert COMMANDS.load("one").summary == "do one thing"
    assert COMMANDS.all().keys() == {*before, "one"}


def test_the_metadata_of_packages_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(wraps=entry_points)
    monkeypatch.setattr(plugins, "entry_points", read)
    forget()
    assert plugins.known("trireme.commands") and plugins.known("trireme.strategies")
    assert read.call_count == 1


def test_a_name_that_is_not_there_is_said_with_one_that_is() -> None:
    with pytest.raises(ConfigurationError, match=r"no command rnu \(did you mean run\?\)"):
        COMMANDS.load("rnu")


def test_a_part_of_ours_that_is_not_installed_names_its_extra(install: Install) -> None:
    plugins._load.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plugins._EXTRAS, "trireme.commands", {"weigh": "doctor"})
        with pytest.raises(
            ConfigurationError,
            match=r"command weigh is in a plug-in .* pip install 'trireme-train\[doctor\]'",
        ):
            COMMANDS.load("weigh")


def test_an_option_of_a_part_that_is_not_installed_names_its_extra() -> None:
    plugins._load.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plugins._EXTRAS, "trireme.hooks", {"trace-all": "tracking"})
        with pytest.raises(ConfigurationError, match=r"pip install 'trireme-train\[tracking\]'"):
            RUN.parser().split(["--trace-all", "1", "program.py"])


def test_an_option_that_names_a_part_that_is_not_installed_names_its_extra() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plugins._EXTRAS, "trireme.commands", {"weigh": "doctor"})
        COMMANDS.check("run")
        COMMANDS.check("no such name at all")  # which the caller refuses, and lists those there are
        with pytest.raises(UsageError, match=r"pip install 'trireme-train\[doctor\]'"):
            COMMANDS.check("weigh")


def test_every_extra_that_errors_name_is_declared() -> None:
    declared = metadata("trireme-train").get_all("Provides-Extra")
    named = {extra for names in plugins._EXTRAS.values() for extra in names.values()}
    assert named <= set(declared or ())


def test_every_entry_point_of_a_part_that_may_be_left_out_has_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    files = [file for about in project["tool"]["plugins"].values() for file in about["files"]]
    for group, named in project["project"]["entry-points"].items():
        for name, value in named.items():
            part = value.replace(".", "/").startswith(tuple(f"{file}/" for file in files))
            assert part == (name in plugins._EXTRAS.get(group, {})), f"{group}: {name}"


def test_one_that_fails_to_import_names_its_distribution_and_why(install: Install) -> None:
    install("broken", "one", "raise LookupError('no such thing')")
    with pytest.raises(
        ConfigurationError,
        match=r"one of broken 1\.5, broken_module:ONE, cannot be imported: LookupError: no such",
    ):
        COMMANDS.load("one")
    assert "one" in COMMANDS  # to list names imports nothing


@pytest.mark.parametrize("value", ["not a valid::value", ""])
def test_an_entry_point_of_another_form_disturbs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write_metadata(tmp_path, "odd", points=f"[trireme.commands]\none = {value}\n")
    assert {"one", "run"} <= set(COMMANDS.names())
    assert COMMANDS.load("run")
    with pytest.raises(ConfigurationError, match=r"one of odd 1\.5, .*is not of the form package"):
        COMMANDS.load("one")
    (tmp_path / "odd-1.5.dist-info" / "METADATA").unlink()
    forget()
    with pytest.raises(ConfigurationError, match="one of a package without METADATA"):
        COMMANDS.load("one")
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("ONE = 'text'", "is no Command;"),
        ("TWO = 'text'", "cannot be imported: AttributeError: module 'wrong_module' has no"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit: 0"),
        (GOOD, "names main='none:main', of which comes ModuleNotFoundError: No module named 'no"),
        (GOOD.replace('"none:main"', "print"), "names main=<built-in function print>, of which"),
        (GOOD.replace("none:main", "math:main"), "AttributeError: module 'math' has no attribute"),
    ],
)
def test_one_that_is_not_as_it_must_be_is_refused(install: Install, code: str, why: str) -> None:
    install("wrong", "one", code)
    with pytest.raises(ConfigurationError) as refused:
        COMMANDS.imported("one", "main")
    text = str(refused.value)
    assert text.startswith("the command one of wrong 1.5, wrong_module:ONE, ") and why in text
    assert text.endswith("; mend or uninstall that package")


def test_two_of_one_name_are_refused_and_both_distributions_named(install: Install) -> None:
    install("first", "run", GOOD)
    with pytest.raises(ConfigurationError, match=r"run, of first 1\.5 and trireme-train "):
        COMMANDS.load("run")


def test_one_whose_extra_is_not_installed_is_not_listed_and_says_what_to_install(
    install: Install,
) -> None:
    install("needy", "one", GOOD, requires='no-such-package>=2; extra == "more"')
    assert "one" not in COMMANDS
    with pytest.raises(
        ConfigurationError, match=r"one needs no-such-package: pip install 'needy\[more\]'"
    ):
        COMMANDS.load("one")
    install("fed", "two", GOOD, requires='msgspec; extra == "more"')
    assert "two" in COMMANDS


def test_metadata_older_than_the_code_say_how_to_install_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugins, "_CORE", ("trireme.none",))
    with pytest.raises(ConfigurationError, match=r"no entry points trireme\.none: they are older"):
        Plugins("trireme.none", "thing", object).names()


def test_importing_trireme_reads_no_metadata() -> None:
    code = "import sys, trireme; assert 'importlib.metadata' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
