"""A loop of its own, started as it stands in every way that there is."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.shell import PROGRAMS, TORCHRUN, TRIREME, Shell
from trireme.records.records import read_starts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

LOOP = PROGRAMS / "loop.py"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (TORCHRUN, ("--nproc-per-node", 2)),
        pytest.param(
            TRIREME, ("run", "--workers", 2, "--strategy", "fsdp"), marks=pytest.mark.slow
        ),
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
    first, second = re.findall("draws: (.+)", ended.text)
    assert not set(first.split()) & set(second.split())
    (saved,) = Path(shell.directory, "run/checkpoints").iterdir()
    state = json.loads((saved / "state.json").read_text())["state"]
    assert saved.name == "step-000000012-writer-1" and state["workers"] == 2
    if command is TRIREME:
        workers = [each for each in read_starts(saved.parents[1]) if "worker" in each.begin.task]
        assert [start.records[-1].status["global_step"] for start in workers] == [12, 12]
        assert all(start.records[-1].status["examples_per_second"] > 0 for start in workers)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_schedule_goes_on_at_the_steps_of_its_own_loop(shell: Shell, strategy: str) -> None:
    words = ("run", "--ps", 1, "--workers", 2, "--strategy", strategy, "--run-dir", "run")
    for start in range(3):
        ended = shell.start(*words, PROGRAMS / "schedule.py").ended()
        assert ended.status == 0, ended.text
        made = 10 * start * (2 if strategy == "async" else 1)
        said = re.findall(r"worker:\d \| (global step \d+, rate \S+)", ended.text)
        assert said == [f"global step {made}, rate 2**-{10 * start}"] * 2, ended.text
        assert "settings by itself" not in ended.text


@pytest.mark.thorough
def test_a_schedule_past_its_end_is_explained_below_torch_s_error(shell: Shell) -> None:
    words = ("run", "--ps", 1, "--workers", 2, PROGRAMS / "schedule_past_its_end.py")
    ended = shell.start(*words).ended()
    assert ended.status == 1, ended.text
    (note,) = re.findall(r"worker:1 \| The program steps this .*", ended.text)
    assert "built for 3 steps, and was asked for step 4" in note
    assert "each update of any worker is a global step" in note


@pytest.mark.thorough
@pytest.mark.slow(but=("async",))
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_worker_that_is_killed_in_a_loop_of_its_own_comes_back_where_the_job_is(
    shell: Shell, strategy: str
) -> None:
    words = ("run", "--ps", 1, "--workers", 2, "--strategy", strategy, "--max-restarts", 1)
    words = (*words, "--run-dir", "run")
    ended = shell.start(*words, PROGRAMS / "own_epochs.py").ended()
    assert ended.status == 0, ended.text
    assert ended.text.count("| ends\n") == 2, ended.text
    after = ended.text.partition("dies in epoch 1")[2]
    assert not re.search(r"worker:1 \| used 0", after), after
    assert re.findall(r"worker:(\d) \| has kept ([\d.]+)", after) == [("1", "0.25")]
    rows = re.findall(r"worker:\d \| used \d ([\d ]+)", ended.text)
    # Each row once an epoch: the batch in its hands when it died was not used, and dealt again.
    used = Counter(row for each in rows for row in each.split())
    assert len(used) == 120 and set(used.values()) == {3}, ended.text
