"""The scripts of `trireme completion`, each in its own shell."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trireme.cli import main
from trireme.cli.command import COMMANDS
from trireme.completion.command import script

ALL_CASES = [
    ("trireme ru", {"run"}),
    ("trireme run --strategy ss", {"ssp"}),
    ("trireme run --max-r", {"--max-restarts"}),
    ("trireme run --ps 1 prog", {"program.py"}),
    ("trireme stop runs/", {"runs/a", "runs/b", "runs/other"}),
    ("trireme top one", {"one"}),
    ("trireme task --job-name p", {"ps"}),
    ("trireme checkpoint ver", {"verify"}),
]
CASES = [case for case in ALL_CASES if case[0].split()[1] in {"ru", *COMMANDS}]
"""Those of commands that are installed."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a program, and with other directories."""
    (tmp_path / "program.py").touch()
    for run in ("runs/a", "runs/b", "runs/other", "one"):
        (tmp_path / run).mkdir(parents=True)
    for shell in ("bash", "zsh", "fish"):
        (tmp_path / f"completion.{shell}").write_text(script(shell))
    return tmp_path


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"NOT TESTED: {name} is not installed (apt-get install {name})")
    return found


def run(directory: Path, *words: str) -> str:
    environ = {"PATH": os.environ["PATH"], "HOME": str(directory), "LC_ALL": "C.UTF-8"}
    ended = subprocess.run(
        words, cwd=directory, env=environ, capture_output=True, text=True, timeout=60
    )
    assert not ended.stderr
    return ended.stdout


def test_bash(directory: Path) -> None:
    commands = ["source completion.bash"]
    for line, _ in CASES:
        words = line.split(" ")
        commands += [
            f"COMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1} COMPREPLY=()",
            '_shtab_trireme; echo "${COMPREPLY[@]}"',
        ]
    printed = run(directory, shell("bash"), "--norc", "-c", "\n".join(commands))
    assert [{*line.split()} for line in printed.splitlines()] == [found for _, found in CASES]


def test_fish(directory: Path) -> None:
    commands = ["source completion.fish"]
    commands += [f"complete -C '{line}'; echo ==" for line, _ in CASES]
    printed = run(directory, shell("fish"), "--no-config", "-c", "\n".join(commands))
    parts = printed.split("==\n")[:-1]
    found = [{line.split("\t")[0] for line in part.splitlines()} for part in parts]
    assert found == [expected for _, expected in CASES]


def test_zsh(directory: Path) -> None:
    """Types each line and a tab at a real terminal: zsh completes only there."""
    with terminal(directory, shell("zsh"), "-f", "-i") as ours:
        type_in(ours, "PS1= PS2=; unsetopt zle_bracketed_paste; autoload -Uz compinit\n")
        type_in(ours, 'compinit -u -D; eval "$(<completion.zsh)"; echo rea""dy\n')
        read_until(ours, "ready")
        for line, expected in CASES:
            if len(expected) > 1:  # lists them, and completes what they have in common
                continue
            whole = " ".join([*line.split(" ")[:-1], *expected])
            type_in(ours, f"{line}\t")
            read_until(ours, whole)
            type_in(ours, "\x15")


@contextmanager
def terminal(directory: Path, *words: str) -> Iterator[int]:
    """Starts a shell at a terminal of its own, and yields that terminal; kills the shell."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        words,
        cwd=directory,
        env={"PATH": os.environ["PATH"], "HOME": str(directory), "TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def type_in(terminal: int, text: str) -> None:
    os.write(terminal, text.encode())


def read_until(terminal: int, text: str, seconds: float = 30.0) -> None:
    """Reads what the terminal shows until it ends with a text, but for spaces."""
    shown, deadline = "", time.monotonic() + seconds
    while text not in shown.replace("\r", ""):
        left = deadline - time.monotonic()
        assert left > 0 and select.select([terminal], [], [], left)[0], f"no {text!r} in {shown!r}"
        shown += os.read(terminal, 4096).decode(errors="replace")


def test_another_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "invalid choice: 'bsh'" in capsys.readouterr().err
