"""A package that adds an engine, which starts tasks as `ssh` would, with options of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.installed import ROOT, trireme

SSH = """#!/bin/sh
# Starts a command "on a host", of which it makes a note.
host=$1
shift
echo "$host $*" >> "$(dirname "$0")/started"
exec "$@"
"""

ON = ("run", "--on", "through")


@pytest.fixture
def ssh(directory: Path) -> Path:
    script = directory.parent / "ssh"
    script.write_text(SSH)
    script.chmod(0o755)
    return script


@pytest.mark.thorough
@pytest.mark.processes
def test_tasks_start_through_it_and_train(directory: Path, ssh: Path) -> None:
    job = (*ON, "--through-command", f"{ssh} {{host}}", "--through-hosts", "one,two")
    demo = (ROOT / "examples" / "digits.py", "--max-steps", 60)
    ended = trireme(directory, *job, "--ps", 1, "--workers", 2, "--run-dir", "run", *demo)
    assert "worker:0 | test accuracy" in ended.stdout
    started = [line.split() for line in (ssh.parent / "started").read_text().splitlines()]
    tasks = {words[words.index("--task") + 1] for words in started}
    assert tasks == {"ps:0", "worker:0", "worker:1"}  # the launcher is the coordinator
    assert {words[0] for words in started} == {"one", "two"}
    record = json.loads((directory.parent / "run" / "job.json").read_text())
    assert record["options"]["through-hosts"] == "one,two"
    assert record["origins"]["through-command"] == "command line"


@pytest.mark.thorough
def test_its_options_are_those_of_the_command_and_its_errors_too(
    directory: Path, tmp_path: Path
) -> None:
    program = tmp_path / "nothing.py"
    program.touch()
    help = " ".join(trireme(directory, "run", "--help").stdout.split())
    assert "through: this host, through a command (default local)" in help
    assert "--through-hosts A,B,... through: the hosts, which the tasks take in turn" in help
    wrong = trireme(directory, *ON, program, status=2)
    assert "--on through starts tasks through a command: give --through-command" in wrong.stderr
    wrong = trireme(directory, "run", "--through-hosts", "a", program, status=2)
    assert "--through-hosts is of another engine: add --on through" in wrong.stderr
    wrong = trireme(directory, "run", "--on", "thruogh", program, status=2)
    assert "did you mean through?" in wrong.stderr
    shown = trireme(directory, *ON, "--through-command", "nice", "--dry-run", program).stdout
    assert ["through-command", "nice", "command", "line"] in map(str.split, shown.splitlines())


def test_without_the_package_there_is_nothing_of_it() -> None:
    words = [sys.executable, "-m", "trireme", "run", "--through-hosts", "a", "a.py"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 2
    assert "`trireme run` has no option --through-hosts" in ended.stderr
