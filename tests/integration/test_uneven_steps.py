"""Process groups without servers in which one process ends early, leaves steps out, or is stopped.

Each is one error, the same in all processes, for every strategy, in a session and in a loop. A
process that computes for long is none.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.integration.shell import PROGRAMS, Ended, Shell
from tests.integration.test_failures import pid_of, report

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PROGRAM = PROGRAMS / "uneven.py"
STRATEGIES, WAYS = ("allreduce", "fsdp"), ("session", "loop")
UNEQUAL = (
    "rank {rank} has ended its training after {made} steps, and rank {other} makes step {next}: "
    "all processes make each step together, so every process must make the same number of steps"
)


def run(shell: Shell, strategy: str, way: str, fault: str, *options: object) -> Ended:
    words = ("run", "--workers", 2, "--strategy", strategy, "--run-dir", "run", *options)
    return shell.run(*words, PROGRAM, way, "--fault", fault)


@pytest.mark.thorough
@pytest.mark.slow(but=("skip-allreduce-session",))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("fault", "made"),
    [("1:31:end", 31), ("0:31:end", 31), ("1:20:skip", 59)],
    ids=["end", "chief ends", "skip"],
)
def test_a_process_with_fewer_steps_is_an_error_that_names_it(
    strategy: str, way: str, fault: str, made: int, shell: Shell
) -> None:
    ended = run(shell, strategy, way, fault)
    rank = int(fault[0])
    words = UNEQUAL.format(rank=rank, made=made, other=1 - rank, next=made + 1)
    assert ended.status == 2, ended.text
    assert words in report(ended)
    for worker in (0, 1):
        assert f"worker:{worker} | error: {words}" in ended.text
    assert "Traceback" not in ended.text and "SIGABRT" not in ended.text


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_process_that_stands_still_is_waited_for_as_long_as_the_progress_timeout_says(
    strategy: str, way: str, shell: Shell
) -> None:
    ended = run(shell, strategy, way, "1:20:sleep", "--progress-timeout", 4)
    assert ended.status == 1, ended.text
    assert "(--progress-timeout): worker:1 has not begun step 21, its main thread is at " in (
        report(ended)
    )
    assert "uneven.py" in report(ended)
    assert "Traceback" not in ended.text and "SIGABRT" not in ended.text


@pytest.mark.slow(but=("0-fsdp-loop",))
@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stopped", [1, 0])
def test_a_process_that_is_stopped_is_given_up_and_all_are_started_again(
    stopped: int, strategy: str, way: str, shell: Shell
) -> None:
    words = ("--workers", 2, "--strategy", strategy, "--run-dir", "run", "--max-restarts", 4)
    words = (*words, "--heartbeat-timeout", 4)
    running = shell.start("run", *words, PROGRAM, way, "--steps", 60, "--pace", 0.1)
    running.until(r"worker:1 \| training")
    os.kill(pid_of(shell.directory / "run", f"worker:{stopped}"), signal.SIGSTOP)
    ended = running.ended(120.0)
    assert ended.status == 0, ended.text
    assert "sent nothing for" in ended.err and "(--heartbeat-timeout)" in ended.err
    assert f"worker:{stopped}" in ended.err
    assert "all workers are started again" in ended.err


@pytest.mark.parametrize("stopped", [1, 0])
def test_a_process_that_is_stopped_between_two_steps_is_given_up_too(
    stopped: int, shell: Shell
) -> None:
    words = ("--heartbeat-timeout", 3, "--max-restarts", 1, "--run-dir", "run", PROGRAM, "session")
    fault = f"{stopped}:10:stop"
    ended = shell.run("run", "--workers", 2, *words, "--steps", 20, "--fault", fault)
    assert ended.status == 0, ended.text
    assert "sent nothing for" in ended.err and "(--heartbeat-timeout)" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("busy", [1, 0])
def test_a_process_that_holds_the_interpreter_lock_and_computes_is_waited_for(
    busy: int, shell: Shell
) -> None:
    words = ("--heartbeat-timeout", 4, "--run-dir", "run", PROGRAM, "session", "--steps", 30)
    ended = shell.run("run", "--workers", 2, *words, "--fault", f"{busy}:20:compute")
    assert ended.status == 0, ended.text
    assert f"waiting for worker:{busy}" in ended.text and ", and uses the processor" in ended.text
