"""A worker's cable is out for longer than any attempt to connect takes, and the worker comes back.

The job is started by hand, on hosts of its own: nothing starts a task again.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.chaos.__main__ import compare_with_table
from tests.chaos.accounts import Account, Incarnation, Note, accounts
from tests.chaos.job import PROGRAM, counted
from tests.faults.hosts import Host, Network, NoHosts, network
from tests.integration.conftest import clean_shell
from tests.integration.shell import TRIREME, Ended, Running, Shell
from trireme.session.checkpoint import list_checkpoints, load

pytestmark = pytest.mark.processes

START_SECONDS = 120.0
END_SECONDS = 120.0
BACK_SECONDS = 60.0
PARTED_SECONDS = 75.0


@dataclass
class ByHand:
    """A job of two servers, each with a copy of everything, and two workers, all over TLS.

    The coordinator is on this host; `alder` and `birch` have a server each, `cedar` and `damson` a
    worker.
    """

    shell: Shell
    network: Network
    data: Path
    options: Sequence[object] = ()
    tasks: dict[str, Running] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        return self.shell.directory

    def host(self, name: str) -> Host:
        return next(host for host in self.network.hosts if host.name == name)

    def start(self) -> None:
        """Starts all tasks; returns when both workers train."""
        places = {"coordinator:0": None, "ps:0": "alder", "ps:1": "birch"}
        places |= {"worker:0": "cedar", "worker:1": "damson"}
        certs, names = self.directory / "certs", [n for task in places for n in ("--task", task)]
        assert self.shell.run("certs", "init", certs).status == 0
        assert self.shell.run("certs", "issue", certs, *names).status == 0
        servers = ",".join(f"{self.host(name).address}:2222" for name in ("alder", "birch"))
        workers = ",".join(f"{self.host(name).address}:2223" for name in ("cedar", "damson"))
        for task, place in places.items():
            role, _, index = task.partition(":")
            words: list[object] = [*TRIREME, "task", f"--job_name={role}", f"--task_index={index}"]
            words += [f"--ps_hosts={servers}", f"--worker_hosts={workers}", "--replicas", "2"]
            words += [f"--coordinator={self.network.own}:2221", "--certs", certs, *self.options]
            if role == "worker":
                words += ["--run-dir", "run", PROGRAM, "--data-dir", self.data.resolve()]
                words += ["--notes", "out", "--until", "out/enough"]
            self.tasks[task] = self._on(place, words)
        for task in ("worker:0", "worker:1"):
            self.tasks[task].until("training", START_SECONDS)
        self.wait_for_updates(0, 1)

    def _on(self, place: str | None, words: Sequence[object]) -> Running:
        text = [str(word) for word in words]
        command = text if place is None else self.host(place).command(text)
        return self.shell.start(command=tuple(command))

    def end(self) -> dict[str, Ended]:
        """Ends the loops of both workers; returns what came of each task."""
        (self.directory / "out" / "enough").touch()
        return {name: task.ended(END_SECONDS) for name, task in self.tasks.items()}

    def acknowledged(self) -> Counter[int]:
        """How many updates of each worker are acknowledged."""
        return Counter(note.worker for note in self.notes() if note.what == "acknowledged")

    def notes(self) -> list[Note]:
        files = (self.directory / "out").glob("notes-*")
        return [Note.read(line) for file in files for line in file.read_text().splitlines()]

    def wait_for_updates(self, *workers: int, more: int = 50, seconds: float = 60.0) -> None:
        """Waits until each of these workers has had so many more updates acknowledged."""
        before, deadline = self.acknowledged(), time.monotonic() + seconds
        while any(self.acknowledged()[worker] < before[worker] + more for worker in workers):
            ended = {name: task.process.poll() for name, task in self.tasks.items()}
            assert not any(status is not None for status in ended.values()), f"ended: {ended}"
            assert time.monotonic() < deadline, f"no {more} updates in {seconds:.0f} s"
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [45.0, 75.0])
def test_a_worker_whose_cable_was_out_comes_back_by_itself_and_every_update_counts_once(
    seconds: float, tmp_path: Path, mnist_dir: Path
) -> None:
    try:
        with (
            network(["alder", "birch", "cedar", "damson"]) as hosts,
            clean_shell(tmp_path) as shell,
        ):
            job = ByHand(shell, hosts, mnist_dir)
            job.start()
            hosts.cut(job.host("damson"))
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                job.wait_for_updates(0)  # the other worker goes on
                time.sleep(min(left, 5.0))
            hosts.heal(job.host("damson"))
            job.wait_for_updates(0, 1, seconds=BACK_SECONDS)
            ended = job.end()
    except NoHosts as error:
        pytest.skip(f"NO HOSTS ARE TESTED: {error}")
    told = ended["worker:1"].text
    assert re.search(r"waiting for ps:.*out of reach, tried for \d+ s more", told)
    found = check_counts(job, ended)
    assert compare_with_table(found, load(list_checkpoints(tmp_path / "run")[-1])) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_that_reaches_all_but_one_server_is_out_until_it_reaches_it_again(
    tmp_path: Path, mnist_dir: Path
) -> None:
    """Other workers, which may be five updates ahead of it, would wait for it."""
    try:
        with (
            network(["alder", "birch", "cedar", "damson"]) as hosts,
            clean_shell(tmp_path) as shell,
        ):
            job = ByHand(shell, hosts, mnist_dir, ("--strategy", "ssp", "--staleness", "5"))
            job.start()
            hosts.part(job.host("damson"), job.host("alder"))
            parted = time.monotonic()
            job.wait_for_updates(0, seconds=PARTED_SECONDS)
            job.wait_for_updates(0)
            assert time.monotonic() - parted < PARTED_SECONDS
            hosts.heal(job.host("damson"))
            job.wait_for_updates(0, 1, seconds=BACK_SECONDS)
            ended = job.end()
    except NoHosts as error:
        pytest.skip(f"NO HOSTS ARE TESTED: {error}")
    check_counts(job, ended)


def check_counts(job: ByHand, ended: dict[str, Ended]) -> dict[Incarnation, Account]:
    """Checks that all tasks have ended well, and that every update counts once; returns them."""
    told = ended["worker:1"].text
    assert {name: each.status for name, each in ended.items()} == dict.fromkeys(ended, 0), told
    assert "this worker was taken for lost and comes back" in told
    data = load(list_checkpoints(job.directory / "run")[-1])
    found = accounts(job.notes(), counted(data))
    assert {worker for worker, _ in found} == {0, 1}
    assert max(incarnation for worker, incarnation in found if worker == 1) >= 2
    assert [each.problem() for each in found.values() if each.problem()] == []
    return found
