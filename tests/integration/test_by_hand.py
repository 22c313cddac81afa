"""A job whose tasks are started one by one, in the classic way, among others that go wrong.

It is played once, with everything that may happen around its one server; each test looks at one
of the ends. The server and both workers must come through unharmed.
"""

from __future__ import annotations

import json
import re
import socket

import pytest

from benchmarks.processes import free_ports
from tests.faults.garbage import send_garbage
from tests.integration.shell import PROGRAMS, Ended, Running, Shell

pytestmark = [pytest.mark.processes, pytest.mark.thorough, pytest.mark.timeout(600)]

STEPS = 30
TRAIN = (PROGRAMS / "train.py", "--out", "out", "--max-steps", STEPS)
SYNC = ("--sync_replicas", "--replicas_to_aggregate=2")


@pytest.fixture(scope="module")
def ends(module_shell: Shell) -> dict[str, Ended]:
    """How each command of the play ended, by a name for it."""
    shell = module_shell
    (shell.directory / "other.secret").write_text("not the secret of this user's jobs")
    (shell.directory / "other.secret").chmod(0o600)
    (port,) = free_ports(1)
    hosts = (f"--ps_hosts=127.0.0.1:{port}", "--worker_hosts=127.0.0.1:1,127.0.0.1:2")

    def task(role: str, index: int, *words: object) -> Running:
        return shell.start("task", f"--job_name={role}", f"--task_index={index}", *hosts, *words)

    with socket.create_server(("127.0.0.1", 0)) as mute:
        # It accepts, for the kernel does, and never says a word.
        silent = f"--ps_hosts=127.0.0.1:{mute.getsockname()[1]}"
        play = {"server": task("ps", 0)}
        play["server"].until("ps:0 listens on ")
        send_garbage(port)
        play |= {
            "first": task("worker", 0, *SYNC, *TRAIN),
            "port taken": task("ps", 0),
            "outside": task("worker", 2, *TRAIN),
            "stranger": task("worker", 1, "--secret-file=other.secret", *TRAIN),
            "no answer": shell.start(
                *("task", "--job_name=worker", silent, "--worker_hosts=127.0.0.1:1"),
                *("--join-timeout", 2, *TRAIN),
            ),
        }
        # So much later that the first is told for whom it waits.
        play["first"].until(r"waiting for worker:1 \(\d+ s left\)")
        play["claimed"] = task("worker", 0, *SYNC, *TRAIN)
        for name in ("port taken", "outside", "stranger", "no answer", "claimed"):
            play[name].ended()
        play["late"] = task("worker", 1, *SYNC, *TRAIN)
        return {name: running.ended() for name, running in play.items()}


def only_error(ended: Ended) -> str:
    """The one line that says what is wrong."""
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.text
    assert "error: " in lines[0]
    return lines[0]


def test_both_workers_train_in_step(ends: dict[str, Ended], module_shell: Shell) -> None:
    assert (ends["first"].status, ends["late"].status) == (0, 0)
    assert ends["first"].err == ends["late"].err == ""
    for worker in (0, 1):
        report = json.loads((module_shell.directory / f"out/worker-{worker}.json").read_text())
        # With two replicas to aggregate the global step counts rounds, and each has a part in all.
        assert report["applied"] == list(range(1, STEPS + 1))
        assert report["global_step"] == STEPS
    assert f"{STEPS} global steps in " in ends["first"].out


def test_the_server_ends_well_when_its_job_has(ends: dict[str, Ended]) -> None:
    assert ends["server"].status == 0
    assert ends["server"].out.splitlines()[-1] == "ps:0 ends: the job is finished"


def test_the_server_says_whom_it_turned_away(ends: dict[str, Ended]) -> None:
    # A worker that is gone when the job's end is told to it has a line of its own.
    said = [
        line for line in ends["server"].err.splitlines() if " an unauthenticated peer at " in line
    ]
    assert all(
        re.match("ps:0 (denied|closed the connection of) an unauthenticated peer at ", s)
        for s in said
    )
    assert "b'GET '" in said[0]
    assert "2147483648 bytes of metadata" in said[1]
    assert "a payload of 1152921504606846976 bytes" in said[2]
    assert "malformed" in said[3]
    assert "worker:1 does not know this job's secret" in said[-1]
    assert len(said) == 6


def test_a_late_worker_is_waited_for_by_name(ends: dict[str, Ended]) -> None:
    waits = re.findall(r"waiting for (\S+) \((\d+) s left\)", ends["first"].out)
    assert waits and {name for name, _ in waits} == {"worker:1"}
    assert all(int(left) < 300 for _, left in waits)


def test_a_taken_port_names_its_holder(ends: dict[str, Ended], module_shell: Shell) -> None:
    assert ends["port taken"].status == 1
    error = only_error(ends["port taken"])
    assert re.search(r"tcp://127\.0\.0\.1:\d+ is taken by process \d+ \(.*--job_name=ps", error)


def test_an_index_outside_the_cluster_is_bad_usage(ends: dict[str, Ended]) -> None:
    assert ends["outside"].status == 2
    assert "worker:2 is outside the cluster, which has worker:0 to worker:1" in only_error(
        ends["outside"]
    )


def test_a_wrong_secret_is_said_to_be_wrong(ends: dict[str, Ended]) -> None:
    assert ends["stranger"].status == 1
    assert "this task's secret is not that of job by-hand" in only_error(ends["stranger"])


def test_a_claimed_index_names_who_holds_it(ends: dict[str, Ended]) -> None:
    assert ends["claimed"].status == 1
    assert re.search(r"worker:0 is held by pid \d+ on \S+, last heard", only_error(ends["claimed"]))


def test_a_host_that_does_not_answer_is_named_in_time(ends: dict[str, Ended]) -> None:
    assert ends["no answer"].status == 1
    error = only_error(ends["no answer"])
    assert re.search(r"could not reach the coordinator at tcp://127\.0\.0\.1:\d+ within 2 s", error)
    assert "did not answer the handshake" in error


def test_a_worker_with_another_strategy_is_refused_and_the_job_goes_on(shell: Shell) -> None:
    (port,) = free_ports(1)
    hosts = (f"--ps_hosts=127.0.0.1:{port}", "--worker_hosts=127.0.0.1:1,127.0.0.1:2")

    def task(role: str, index: int, *words: object) -> Running:
        return shell.start("task", f"--job_name={role}", f"--task_index={index}", *hosts, *words)

    server = task("ps", 0)
    server.until("ps:0 listens on ")
    asynchronous, other = (
        task("worker", 0, "--strategy=async", *TRAIN),
        task("worker", 1, "--strategy=sync", *TRAIN),
    )
    ends = {"async": asynchronous.ended(), "sync": other.ended()}
    (refused,) = (name for name, ended in ends.items() if ended.status)
    (trained,) = ends.keys() - {refused}
    assert ends[refused].status == 2
    assert "the strategies differ" in only_error(ends[refused])
    assert f"{STEPS} global steps in " in ends[trained].out
    assert server.ended().out.splitlines()[-1] == "ps:0 ends: the job is finished"
