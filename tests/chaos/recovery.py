"""Measures how long training pauses when a task dies, is stopped, or joins.

    python -m tests.chaos.recovery                  make recovery does this
    python -m tests.chaos.recovery --kills 20 --only "kill server"
    python -m tests.chaos.recovery --ballast 32     values of 32 MB more
    python -m tests.chaos.recovery --tls --hosts    between network namespaces, encrypted

Each row is a job of its own, of MNIST's network under full load, whose tasks are hit one after the
other, each time when the job is whole again. A pause is the longest time in which a worker that was
not hit itself had no update acknowledged, from the moment of the fault until the job was whole
again and that worker has made further updates. Interpreters start meanwhile, on the same cores.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.chaos.__main__ import HOSTS, say, show_logs
from tests.chaos.accounts import accounts, longest_gap
from tests.chaos.copies import moved_share, shards_of
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.job import Job, Size, counted
from tests.chaos.program import SAVE_EVERY
from tests.faults.hosts import Network, NoHosts, network
from tests.integration.conftest import clean_shell
from trireme.cluster.messages import ClusterStatus
from trireme.cluster.spec import task_name

MEDIAN_SECONDS, WORST_SECONDS = 1.0, 2.0
OTHERS_SECONDS = 0.5
START_SECONDS = 30.0  # where all copies are lost and no server is left, until one has started
FEWEST_MOVED, MOST_MOVED = 0.25, 0.42
MOST_LOST = 1.2  # of what comes between two checkpoints, as it goes on while one is saved
SETTLE_UPDATES = 20


@dataclass(frozen=True)
class Scene:
    """What is measured in one job.

    Attributes:
        faults: the names of the faults, which take turns.
        role: of the tasks that are hit; "" for none.
        servers: at the begin.
        strategy: of the job.
        median, worst: how long the pause may be, in seconds.
        waits: whether the deadline of a silent task may pass before that.
        often: whether it is done as often as `--kills` says, and not as `--times` says.
        loses: whether updates may be lost, as all copies of a shard are.
    """

    faults: tuple[str, ...]
    role: str
    servers: int
    strategy: str
    median: float
    worst: float
    waits: bool = False
    often: bool = False
    loses: bool = False


SCENES = {
    "kill server": Scene(
        ("kill server",), "ps", 3, "async", MEDIAN_SECONDS, WORST_SECONDS, often=True
    ),
    "kill worker": Scene(("kill worker",), "worker", 3, "sync", OTHERS_SECONDS, OTHERS_SECONDS),
    "stop server": Scene(
        ("stop server",), "ps", 3, "async", MEDIAN_SECONDS, WORST_SECONDS, waits=True
    ),
    "stop worker": Scene(
        ("stop worker",), "worker", 3, "sync", OTHERS_SECONDS, OTHERS_SECONDS, waits=True
    ),
    "add server": Scene(
        ("add server", "remove server"), "", 2, "async", OTHERS_SECONDS, OTHERS_SECONDS
    ),
    "kill all copies": Scene(
        ("kill all copies",), "ps", 3, "async", START_SECONDS, START_SECONDS, loses=True
    ),
}
"""What is measured, by its name."""


@dataclass
class Pauses:
    """What a fault has caused.

    Attributes:
        seconds: the pauses.
        moved: the shares of the slots that have moved.
        lost: how many steps were lost, each time that the job went back to a checkpoint.
    """

    seconds: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Hit:
    """A fault that was made: which, whom it hit, from when until all was whole, what it moved."""

    fault: str
    target: str
    at: float
    over: float
    moved: float


def play(options: argparse.Namespace, scene: Scene, hosts: Network | None) -> dict[str, Pauses]:
    """Runs a job, makes the faults, and returns the pauses by fault.

    Raises:
        AssertionError: the job fails, or hangs, or its updates were not counted once.
    """
    size = Size(scene.servers, options.workers, options.replicas)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="trireme-recovery-"))
        shell = stack.enter_context(clean_shell(Path(directory)))
        job = Job(shell, hosts, size, options.deadline)
        try:
            words = [*options.options.split(), *(["--tls"] if options.tls else [])]
            job.start(
                options.data, ["--strategy", scene.strategy, *words], ["--ballast", options.ballast]
            )
            hits = [
                hit
                for turn in range(options.kills if scene.often else options.times)
                for hit in strike(job, scene, turn)
            ]
            ended = job.end()
            assert ended.status in (0, 130), f"status {ended.status}: {ended.text[-3000:]}"
            check_counts(job, scene)
            return pauses(job, hits, ended.text)
        except BaseException:
            show_logs(job)
            raise


def strike(job: Job, scene: Scene, turn: int) -> list[Hit]:
    """Makes each fault of a scene once, each when the job is whole and trains."""
    hits = []
    for name in scene.faults:
        before = whole(job)
        target = choose(before, scene.role, turn)
        at, pid = time.monotonic(), job.pid(target)
        (KillAllCopies() if scene.loses else FAULTS[name]).strike(job, target)
        over = job.wait_until_whole(None if pid is None else (target, pid))
        after = whole(job)
        hits.append(Hit(name, target, at, over, moved_share(shards_of(before), shards_of(after))))
    return hits


def whole(job: Job) -> ClusterStatus:
    """Waits until a job is whole, and until each worker has made some updates since."""
    job.wait_until_whole()
    job.wait_for_updates(SETTLE_UPDATES)
    status = job.status()
    assert status is not None, "the coordinator does not answer"
    return status


def choose(status: ClusterStatus, role: str, turn: int) -> str:
    """Returns the task to hit: they take turns. A server is the primary of a shard."""
    if not role:
        return "one"
    indices = [task.index for task in status.tasks if task.role == role and task.state == "live"]
    if role == "ps":
        primaries = {shard.primary for shard in shards_of(status)}
        indices = [index for index in indices if index in primaries]
    assert indices, f"there is no {role} to be hit"
    return task_name(role, indices[turn % len(indices)])


class KillAllCopies(Fault):
    """SIGKILL to all servers that have a copy of the shards of one of them."""

    name = "kill all copies"

    def targets(self, job: Job, status: ClusterStatus) -> Sequence[str]:
        return [task_name("ps", shard.primary) for shard in shards_of(status)]

    def strike(self, job: Job, target: str) -> None:
        status = job.status()
        assert status is not None, "the coordinator does not answer"
        shard = next(s for s in shards_of(status) if task_name("ps", s.primary) == target)
        for index in shard.copies:
            assert job.tasks.send(task_name("ps", index), signal.SIGKILL)


def pauses(job: Job, hits: Sequence[Hit], said: str) -> dict[str, Pauses]:
    """Returns what each fault has caused to those that it did not hit.

    Args:
        job: the job, which has ended.
        hits: the faults.
        said: what the job has printed.
    """
    lost = [int(a) - int(b) for a, b in re.findall(r"back from step (\d+) to step (\d+)", said)]
    times: dict[str, list[float]] = {}
    for note in job.notes():
        if note.what == "acknowledged":
            times.setdefault(task_name("worker", note.worker), []).append(note.at)
    found: dict[str, Pauses] = {}
    for hit in hits:
        others = [each for worker, each in times.items() if worker != hit.target]
        ends = [next(at for at in each if at > hit.over) for each in others]
        gaps = [longest_gap(each, hit.at, end) for each, end in zip(others, ends, strict=True)]
        of_fault = found.setdefault(hit.fault, Pauses())
        of_fault.seconds.append(max(gaps))
        of_fault.moved.append(hit.moved)
        of_fault.lost = lost
    return found


def check_counts(job: Job, scene: Scene) -> None:
    """Checks that each update is counted once, where a step is an update of one worker."""
    if scene.strategy != "async" or scene.loses:
        return
    for who, account in accounts(job.notes(), counted(job.saved()[-1])).items():
        assert not account.problem(), f"worker:{who[0]}, start {who[1]}: {account.problem()}"


def report(name: str, scene: Scene, found: dict[str, Pauses], deadline: float) -> list[str]:
    """Prints a row for each fault, and returns what is not as promised."""
    problems = []
    more = deadline if scene.waits else 0.0
    most, worst = more + scene.median, more + scene.worst
    for fault, each in found.items():
        middle, longest = median(each.seconds), max(each.seconds)
        moved = f"{median(each.moved):.0%} of the slots moved" if not scene.role else ""
        if scene.loses:
            moved = f"at most {max(each.lost, default=0)} steps lost; saved every {SAVE_EVERY}"
        say(
            f"{fault:<15} {scene.strategy:<8} {len(each.seconds):5} {middle:8.2f} {longest:8.2f}"
            f"   {most:g} / {worst:g}   {moved}"
        )
        if middle > most or longest > worst:
            problems.append(f"{name}: {fault}: {middle:.2f} s, at worst {longest:.2f} s")
        if max(each.lost, default=0) > MOST_LOST * SAVE_EVERY:
            problems.append(f"{name}: {max(each.lost)} steps lost")
        bad = [share for share in each.moved if not FEWEST_MOVED <= share <= MOST_MOVED]
        if not scene.role and bad:
            problems.append(f"{name}: {fault}: {bad[0]:.0%} of the slots moved")
    return problems


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="how often a server is killed")
    parser.add_argument("--times", type=int, default=5, help="how often each other fault is made")
    parser.add_argument("--only", default=",".join(SCENES), help=f"some of: {', '.join(SCENES)}")
    default = Path(os.environ.get("TRIREME_DATA", "../shared/data")) / "mnist"
    parser.add_argument("--data", type=Path, default=default, help="the folder of MNIST's files")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--deadline", type=float, default=2.0, help="silent seconds after which a task is lost"
    )
    parser.add_argument("--ballast", type=int, default=0, help="MB of values beside the network's")
    parser.add_argument("--tls", action="store_true", help="encrypt all connections")
    parser.add_argument("--hosts", action="store_true", help="tasks on hosts of their own")
    parser.add_argument("--options", default="", help='of trireme run: "--transport tcp"')
    given = parser.parse_args()
    given.names = [name.strip() for name in given.only.split(",") if name.strip()]
    unknown = [name for name in given.names if name not in SCENES]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(SCENES)}")
    return given


def main() -> int:
    options = arguments()
    problems: list[str] = []
    with ExitStack() as stack:
        hosts: Network | None = None
        if options.hosts:
            try:
                hosts = stack.enter_context(network(HOSTS))
            except NoHosts as error:
                say(f"ALL TASKS ARE ON ONE HOST: {error}")
        say(f"a silent task is lost after {options.deadline:g} s")
        say("fault           strategy count   median    worst   promised")
        for name in options.names:
            found = play(options, SCENES[name], hosts)
            problems += report(name, SCENES[name], found, options.deadline)
    for problem in problems:
        say(f"BAD: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
