"""`--check-every` and `--on-corruption`, as a user gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.conftest import clean_shell
from tests.integration.shell import Ended, Shell
from trireme.cli.command import COMMANDS
from trireme.strategies import BACKENDS

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).parent / "program.py"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with clean_shell(tmp_path) as shell:
        yield shell


def run(shell: Shell, *words: object, program: tuple[object, ...] = (), every: int = 1) -> Ended:
    checks = ("--check-every", every, "--run-dir", "run")
    return shell.run("run", *words, *checks, PROGRAM, "--out", "out", *program)


def digests(shell: Shell) -> set[str]:
    return {path.read_text() for path in (shell.directory / "out").iterdir()}


def test_a_worker_whose_memory_changes_stops_the_job_and_is_not_started_again(shell: Shell) -> None:
    words = ("--ps", 1, "--workers", 2, "--strategy", "sync", "--max-restarts", 3)
    ended = run(shell, *words, "--on-corruption", "stop", program=("--flip-in", 1))
    assert ended.status == 1, ended.text
    text = " ".join(ended.err.split())
    assert (
        "First worker:1 failed: corrupted values: memory of worker:1 has changed by itself after "
        "step 4: bit 22 of element 1 of '2.weight'"
    ) in text
    assert "test that task's host" in text
    assert "started again" not in text


@pytest.mark.thorough
def test_a_job_that_is_warned_goes_on_and_its_records_say_so(shell: Shell) -> None:
    words = ("--ps", 1, "--workers", 2, "--strategy", "sync")
    ended = run(shell, *words, program=("--flip-in", 1, "--bit", 2))
    assert ended.status == 0, ended.text
    assert "memory of worker:1 has changed by itself after step 4" in ended.text
    lines = (shell.directory / "run" / "records" / "worker-1.jsonl").read_text().splitlines()
    status = json.loads(lines[-1])["status"]
    assert status["corruptions"] == 1
    assert "memory of worker:1 has changed" in status["corrupted"]
    if "top" in COMMANDS:
        assert "worker:1: corrupted values: memory of worker:1" in shell.run("top", "run").out


@pytest.mark.skipif("parallel" not in BACKENDS, reason="needs the plug-in parallel")
@pytest.mark.thorough(but=("compared",))
@pytest.mark.parametrize("unseen", [(), ("--unseen",)], ids=["at rest", "compared"])
def test_a_process_in_the_minority_is_filled_again(
    shell: Shell, unseen: tuple[object, ...]
) -> None:
    words = ("--workers", 3, "--strategy", "allreduce", "--on-corruption", "heal")
    ended = run(shell, *words, program=("--flip-in", 2, *unseen))
    assert ended.status == 0, ended.text
    if unseen:
        assert (
            "worker:2 has other values of the model than worker:0, worker:1 at step" in ended.text
        )
    else:
        assert "memory of worker:2 has changed by itself after step 4" in ended.text
    assert len(digests(shell)) == 1


@pytest.mark.thorough
@pytest.mark.skipif("parallel" not in BACKENDS, reason="needs the plug-in parallel")
def test_two_processes_that_differ_end_the_job(shell: Shell) -> None:
    words = ("--workers", 2, "--strategy", "allreduce", "--on-corruption", "heal")
    ended = run(shell, *words, program=("--flip-in", 1, "--unseen"))
    assert ended.status == 1, ended.text
    assert "worker:0 and worker:1 have different values of the model at step" in ended.text
    assert "nothing says who is right" in ended.text


@pytest.mark.thorough
@pytest.mark.skipif("parallel" not in BACKENDS, reason="needs the plug-in parallel")
def test_shards_are_compared_with_their_replicas(shell: Shell) -> None:
    words = ("--mesh", "dp=2,fsdp=2", "--strategy", "fsdp")
    ended = run(shell, *words, program=("--flip-in", 3, "--unseen"))
    assert ended.status == 0, ended.text
    assert "worker:1 and worker:3 have different values of the model at step" in ended.text


@pytest.mark.thorough
@pytest.mark.skipif("parallel" not in BACKENDS, reason="needs the plug-in parallel")
def test_where_nothing_can_be_compared_one_warning_says_so(shell: Shell) -> None:
    ended = run(shell, "--workers", 2, "--strategy", "fsdp")
    assert ended.status == 0, ended.text
    assert ended.text.count("no two processes hold the same values") == 1


@pytest.mark.parametrize(("every", "warnings"), [(2, 1), (1, 0)])
def test_servers_without_copies_are_said_to_find_few_flips(
    shell: Shell, every: int, warnings: int
) -> None:
    words = ("--ps", 1, "--workers", 2, "--strategy", "sync")
    ended = run(shell, *words, every=every)
    assert ended.status == 0, ended.text
    assert ended.text.count("finds few flips in servers without copies") == warnings


@pytest.mark.thorough
def test_a_lone_process_computes_again_from_values_that_it_has_put_back(shell: Shell) -> None:
    words = ("--on-corruption", "heal")
    ended = run(shell, *words, program=("--flip-in", 0))
    assert ended.status == 0, ended.text
    assert "memory of worker:0 has changed by itself after step 4" in ended.text
    healed = digests(shell)
    assert run(shell, *words, program=("--out", "out")).status == 0
    assert digests(shell) == healed


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("trireme.loops") is None, reason="needs the plug-in loops")
def test_values_are_put_back_in_a_loop_of_ones_own(shell: Shell) -> None:
    words = ("--ps", 1, "--workers", 2, "--strategy", "sync", "--on-corruption", "heal")
    ended = run(shell, *words, program=("--flip-in", 1, "--loop", "--bit", 3))
    assert ended.status == 0, ended.text
    assert "memory of worker:1 has changed by itself after step 4: bit 3 of element 1" in ended.text
    assert len(digests(shell)) == 1


def test_what_to_do_without_a_check_is_refused(shell: Shell) -> None:
    words = ("--ps", 1, "--workers", 1, "--on-corruption", "heal")
    ended = shell.run("run", *words, PROGRAM, "--out", "out")
    assert ended.status == 2
    assert "add --check-every N" in ended.err
