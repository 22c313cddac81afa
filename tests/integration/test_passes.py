"""Passes, batches left out and loops left early, with real processes under each strategy."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from tests.integration.shell import PROGRAMS, PYTHON, TRIREME, Shell

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

PASSES = PROGRAMS / "passes.py"
SIZE, EPOCHS = 42, 2
SECONDS = 120.0

SYNCHRONOUS = {
    "sync": ("--ps", 2, "--workers", 2, "--strategy", "sync"),
    "allreduce": ("--workers", 2),
    "fsdp": ("--workers", 2, "--strategy", "fsdp"),
}
OTHERS = {
    "async": ("--ps", 1, "--workers", 2),
    "ssp": ("--ps", 1, "--workers", 2, "--strategy", "ssp", "--staleness", 1),
    "averaging": ("--ps", 1, "--workers", 2, "--strategy", "averaging", "--every", 3),
}


def ran(shell: Shell, case: str, words: tuple[object, ...] | None) -> tuple[Counter[int], set[str]]:
    """Runs the program; returns the examples of its steps, and what each worker comes to."""
    program = (PASSES, case)
    if words is None:
        ended = shell.start(*program, command=PYTHON).ended(SECONDS)
    else:
        ended = shell.start("run", *words, *program, command=TRIREME).ended(SECONDS)
    assert ended.status == 0, ended.text
    had = re.findall(r"had (\[[^]]*\]); (loss \S+ at \d+)\.", ended.text)
    assert len(had) == (1 if words is None else 2), ended.text
    assert ended.text.count("count as left out") <= len(had)
    return Counter(n for found, _ in had for n in json.loads(found)), {end for _, end in had}


@pytest.mark.thorough
@pytest.mark.slow(but=("sync-skips", "allreduce-two-steps"))
@pytest.mark.parametrize("case", ["two-steps", "skips"])
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_as_in_one_process(shell: Shell, strategy: str, case: str) -> None:
    alone = ran(shell, case, None)
    several = ran(shell, case, SYNCHRONOUS[strategy])
    assert several[0] == alone[0]
    (end,) = alone[1]
    for each in several[1]:
        loss, step = each.split()[1::2]
        assert float(loss) == pytest.approx(float(end.split()[1]), rel=1e-6)
        assert step == end.split()[3]


@pytest.mark.slow(but=("async-skips", "sync-break"))
@pytest.mark.thorough
@pytest.mark.parametrize("case", ["two-steps", "skips", "break"])
@pytest.mark.parametrize("strategy", [*OTHERS, "sync"])
def test_no_example_is_lost_and_nothing_hangs(shell: Shell, strategy: str, case: str) -> None:
    had, _ = ran(shell, case, OTHERS.get(strategy, SYNCHRONOUS["sync"]))
    passes = 1 if case == "break" else EPOCHS
    if case == "skips":
        assert had.total() < passes * SIZE and max(had.values()) <= passes
    else:
        assert had == dict.fromkeys(range(SIZE), passes)


@pytest.mark.slow(but=("allreduce-break",))
@pytest.mark.thorough
@pytest.mark.parametrize("case", ["break", "leaves-out"])
@pytest.mark.parametrize("strategy", ["allreduce", "fsdp"])
def test_where_one_process_of_a_group_leaves_its_loop_or_a_batch_out_all_say_so(
    shell: Shell, strategy: str, case: str
) -> None:
    words = ("run", *SYNCHRONOUS[strategy], PASSES, case)
    ended = shell.start(*words, command=TRIREME).ended(SECONDS)
    assert ended.status == 2, ended.text
    assert f"| error: rank {1 if case == 'break' else 0} " in ended.text
    assert "every process must make the same number of steps" in ended.text
    assert "Exception ignored" not in ended.text
