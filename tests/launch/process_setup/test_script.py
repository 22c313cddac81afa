from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from trireme.errors import UsageError
from trireme.launch.exit_reason import ExitReason, describe_status
from trireme.launch.process_setup import program
from trireme.launch.process_setup.program import check_script, run_script
from trireme.launch.task_messages import LauncherPipe, decode_message


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a program and runs it; the interpreter is as before afterwards."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(program, "_FAILED", [])

    def run(text: str, *arguments: str, task: str = "") -> tuple[int, ExitReason | None]:
        path = tmp_path / "train.py"
        path.write_text(text)
        reader, writer = os.pipe()
        status = run_script(path, arguments, task=task, launcher=LauncherPipe(os.dup(writer)))
        os.write(writer, b"\n")  # there may be no message
        with os.fdopen(reader, "rb") as messages:
            reason = decode_message(messages.readline())
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
    assert decode_message(b"") is None
    assert decode_message(b'{"type": "ended", "kind": "exit"') is None
    assert decode_message(b'{"type": "unheard-of"}') is None


def test_a_status_says_what_little_it_can() -> None:
    assert describe_status(-9).summary == "killed by SIGKILL"
    assert describe_status(-200).summary == "killed by signal 200"
    assert describe_status(4).summary == "ended with status 4"


def test_who_runs_at_exit_can_see_a_failing_status(script) -> None:
    assert script("import sys; sys.exit(0)")[0] == 0
    assert program.ProgramEnd().error is None
    assert script("import sys; sys.exit(3)")[0] == 3
    assert isinstance(program.ProgramEnd().error, SystemExit)
