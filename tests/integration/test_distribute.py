"""A loop of its own, started as it stands in every way that there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.integration.shell import PROGRAMS, TORCHRUN, TRIREME, Shell

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

LOOP = PROGRAMS / "loop.py"


@pytest.mark.thorough(but=("command0-words0",))
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (TORCHRUN, ("--nproc-per-node", 2)),
        (TRIREME, ("run", "--workers", 2, "--strategy", "fsdp")),
        (TRIREME, ("run", "--ps", 1, "--workers", 2, "--strategy", "sync")),
    ],
)
def test_two_processes_train_one_model(
    shell: Shell, command: tuple[str, ...], words: tuple[object, ...]
) -> None:
    environ = {"TRIREME_RUN_DIR": "run"}
    ended = shell.start(*words, LOOP, environ=environ, command=command).ended()
    assert ended.status == 0, ended.text
    said = dict(re.findall(r"replica (\d) of 2: ([\d.]+)", ended.text))
    assert said.keys() == {"0", "1"} and said["0"] == said["1"]
    (saved,) = Path(shell.directory, "run/checkpoints").iterdir()
    state = json.loads((saved / "state.json").read_text())["state"]
    assert saved.name == "step-000000012" and state["workers"] == 2
