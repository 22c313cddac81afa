from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trireme.errors import UsageError
from trireme.launch.exit_reason import ExitReason, LauncherPipe, decode_reason, describe_status
from trireme.launch.process_setup import program
from trireme.launch.process_setup.program import (
    check_program,
    check_script,
    program_name,
    run_program,
)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a program and runs it; the interpreter is as before afterwards."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(program, "FAILED", [])

    def run(text: str, *arguments: str, task: str = "") -> tuple[int, ExitReason | None]:
        path = tmp_path / "train.py"
        path.write_text(text)
        reader, writer = os.pipe()
        status = run_program(
            [str(path), *arguments], task=task, launcher=LauncherPipe(os.dup(writer))
        )
        os.write(writer, b"\n")  # there may be no message
        with os.fdopen(reader, "rb") as messages:
            reason = decode_reason(messages.readline())
        os.close(writer)
        assert reason is None or isinstance(reason, ExitReason)
        return status, reason

    return run


def test_runs_as_python_would(script, capsys, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7")
    text = "import sys, beside; print(__name__, sys.argv[1:], beside.value, __file__)"
    assert script(text, "--a", "--", "b") == (0, None)
    assert capsys.readouterr().out == f"__main__ ['--a', '--', 'b'] 7 {tmp_path / 'train.py'}\n"


def test_an_exception_shows_only_the_frames_of_the_program(script, capsys, tmp_path) -> None:
    status, exit_reason = script("def f():\n    raise ValueError('boom')\nf()\n")
    error = capsys.readouterr().err
    assert status == 1
    assert error.count("Traceback") == 1
    assert error.count("File ") == 2
    assert "runpy" not in error
    assert error.splitlines()[-1] == "ValueError: boom"
    assert exit_reason is not None
    assert (exit_reason.kind, exit_reason.summary) == ("exception", "ValueError: boom (train.py:2)")


def test_the_place_is_the_program_s_own_line(script, capsys) -> None:
    _, exit_reason = script("import json\n\njson.loads('{')\n")
    assert exit_reason is not None
    assert exit_reason.summary.startswith("JSONDecodeError: ")
    assert exit_reason.summary.endswith("(train.py:3)")


def test_a_syntax_error_names_file_and_line(script, capsys) -> None:
    status, _ = script("x = = 1\n")
    assert status == 1
    assert 'train.py", line 1' in capsys.readouterr().err


def test_our_own_errors_are_one_line(script, capsys) -> None:
    text = "from trireme.errors import {0}\nraise {0}('what to do')\n"
    assert script(text.format("DataError"), task="worker:1")[0] == 1
    assert capsys.readouterr().err == "worker:1: error: what to do\n"
    assert script(text.format("ModelMismatchError"))[0] == 2
    assert capsys.readouterr().err == "error: what to do\n"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("UnsupportedOptimizerError", "usage"),
        ("DataError", "error"),
        ("AuthenticationError", "error"),
        ("JobFailed", "victim"),
        ("WaitTimeout", "victim"),
        ("ConnectionBroken", "victim"),
    ],
)
def test_tells_the_launcher_whose_fault_it_was(script, capsys, error: str, kind: str) -> None:
    _, exit_reason = script(f"from trireme.errors import {error}\nraise {error}('why\\nmore')\n")
    assert exit_reason is not None
    assert (exit_reason.kind, exit_reason.summary) == (kind, "why")
    over = capsys.readouterr().err == "ends: the job is over; the launcher says how\n"
    assert over == (error == "JobFailed")  # it may have finished


@pytest.mark.parametrize(
    ("call", "status", "kind", "said"),
    [
        ("sys.exit()", 0, None, ""),
        ("sys.exit(0)", 0, None, ""),
        ("sys.exit(3)", 3, "exit", ""),
        ("sys.exit(130)", 130, None, ""),
        ("sys.exit('no data')", 1, "exit", "no data\n"),
        ("raise KeyboardInterrupt", 130, None, ""),
    ],
)
def test_exit_statuses(script, capsys, call: str, status: int, kind: str | None, said: str) -> None:
    got, exit_reason = script(f"import sys\n{call}\n")
    assert got == status
    assert capsys.readouterr().err == said
    assert (exit_reason.kind if exit_reason is not None else None) == kind


def test_a_program_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no program train.py"):
        check_script("train.py")
    with pytest.raises(UsageError, match="a directory"):
        check_script(str(tmp_path))
    (tmp_path / "train.py").write_text("")
    assert check_script("train.py") == Path("train.py")
    if os.getuid() != 0:
        (tmp_path / "train.py").chmod(0)
        with pytest.raises(UsageError, match="permissions"):
            check_script("train.py")


def test_a_message_is_read_whole_or_not_at_all() -> None:
    assert decode_reason(b"") is None
    assert decode_reason(b'{"type": "ended", "kind": "exit"') is None
    assert decode_reason(b'{"type": "unheard-of"}') is None


def test_a_status_says_what_little_it_can() -> None:
    assert describe_status(-9).summary == "killed by SIGKILL"
    assert describe_status(-200).summary == "killed by signal 200"
    assert describe_status(4).summary == "ended with status 4"


def test_who_runs_at_exit_can_see_a_failing_status(script) -> None:
    assert script("import sys; sys.exit(0)")[0] == 0
    assert not program.FAILED
    assert script("import sys; sys.exit(3)")[0] == 3
    assert isinstance(program.FAILED[-1], SystemExit)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in the directory that this process stands in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["somewhere", *sys.path[1:]])
    for each in ("here/deep/train.py", "here/beside.py", "runnable/__main__.py", "apart/x.py"):
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text("")
    for each in ("here", "here/deep", "runnable"):
        (tmp_path / each / "__init__.py").write_text("")
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("here", "apart")]:
        del sys.modules[name]


def test_a_module_runs_as_by_python_m(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "here" / "deep" / "train.py").write_text(
        "import sys\nfrom .. import beside\n"
        "print(__name__, __package__, sys.argv, sys.path[0])\nsys.exit(4)\n"
    )
    assert run_program(["-m", "here.deep.train", "--depth", "2"]) == 4
    path = package / "here" / "deep" / "train.py"
    argv = [str(path), "--depth", "2"]
    assert capsys.readouterr().out == f"__main__ here.deep {argv} {package}\n"


def test_the_traceback_of_a_module_begins_in_it(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "here" / "beside.py").write_text("1 / 0\n")
    assert run_program(["-m", "here.beside"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("  File ") == 1 and "beside.py" in shown and "ZeroDivisionError" in shown


def test_a_module_is_found_without_an_import_of_its_packages(package: Path) -> None:
    (package / "here" / "__init__.py").write_text("raise AssertionError")
    for module in ("here.deep.train", "here.beside", "runnable", "apart.x", "json.tool"):
        check_program(["-m", module])
    assert "here" not in sys.modules


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m"], "name a module after -m"),
        (["-m", "nowhere.train"], "there is no module nowhere.train"),
        (["-m", "here/beside.py"], "with dots and without .py"),
        (["here"], "is a directory"),
    ],
)
def test_a_module_that_cannot_run_is_an_error(
    package: Path, words: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_program(words)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["a/train.py", "x"], "train"),
        (["-m", "here.deep.train"], "train"),
        (["-m", "runnable.__main__"], "runnable"),
    ],
)
def test_a_run_directory_is_called_after_its_program(words: list[str], name: str) -> None:
    assert program_name(words) == name
