"""What ended a program, as a function sees it that runs at exit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WATCH = """
import atexit, sys
from trireme.loops.program_end import ProgramEnd
end = ProgramEnd()
end.watch()
_ = atexit.register(lambda: print("ended by", repr(end.error)))
"""
FAILED = "ended by ZeroDivisionError('division by zero')\n"
ENDED = "ended by None\n"

HOOKED = """
before = sys.excepthook
sys.excepthook = lambda *error: before(*error)
1 / 0
"""
SHOWN = """
try:
    1 / 0
except ZeroDivisionError:
    sys.excepthook(*sys.exc_info())
"""
IN_A_FUNCTION = """
def show():
    try:
        1 / 0
    except ZeroDivisionError:
        sys.excepthook(*sys.exc_info())
show()
"""
IN_A_THREAD = """
import threading
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
"""
CONSOLE = f"""
import code
console = code.InteractiveConsole()
for line in {json.dumps([*WATCH.strip().splitlines(), "1 / 0"])}:
    console.push(line)
"""


def run(directory: Path, *words: str, typed: str = "") -> str:
    """Returns what a program prints that shows an exception."""
    ended = subprocess.run(
        [sys.executable, *words],
        input=typed,
        cwd=directory,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert "ZeroDivisionError" in ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("1 / 0", FAILED),
        (HOOKED, FAILED),
        ("sys.ps1 = 'left by a console of the program'; 1 / 0", FAILED),
        (SHOWN, ENDED),
        (IN_A_FUNCTION, ENDED),
        (IN_A_THREAD, ENDED),
    ],
)
def test_a_script_ends_by_what_nobody_has_caught(tmp_path: Path, end: str, said: str) -> None:
    (tmp_path / "script.py").write_text(f"{WATCH}\n{end}\n")
    assert run(tmp_path, "script.py") == said


@pytest.mark.parametrize("typed", [f"1 / 0\n{WATCH}", f"{WATCH}1 / 0\n"])
def test_an_exception_at_a_prompt_ends_nothing(tmp_path: Path, typed: str) -> None:
    assert run(tmp_path, "-i", typed=typed) == ENDED


def test_nor_does_one_that_a_script_left_before_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"{WATCH}\n1 / 0\n")
    assert run(tmp_path, "-i", "script.py") == ENDED


def test_nor_does_one_in_a_console_of_the_programs_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CONSOLE)
    assert run(tmp_path, "script.py") == ENDED
