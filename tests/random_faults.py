"""Kills and stops workers at random, for as long as told, and counts what became of each update.

    python -m tests.random_faults --seconds 1200 --seed 1    make random-faults does this
    python -m tests.random_faults --job 1007                 one job again, by the seed it printed

Each job is `programs/counting.py` on two servers: gradients are whole numbers and the learning rate
is 1, so the values count the updates of each worker. SIGKILL, SIGSTOP and SIGCONT reach workers at
random times, for stops long enough that they are given up too. A job ends at its last step, or by
SIGTERM to its launcher. Then:

- the launcher has ended, in time, with the status of a job that finished or was interrupted;
- no process is left, and no shared memory;
- for each worker: acknowledged <= applied <= attempted, with no more between them than the worker
  had pushes under way when it was hit; applied in the values is applied in the exactly-once table,
  in every element, at both servers; and all together make the global step.

The times are drawn from the seed; what a process does at that time is not, so a seed repeats the
kind of a job and its faults, and not every interleaving.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.processes import Tasks
from tests.integration.conftest import clean_shell
from tests.integration.shell import PROGRAMS, Ended, Running, Shell
from tests.integration.test_counting import notes, table, updates
from trireme.session.checkpoint import CheckpointData, latest

MODES: dict[str, tuple[str, ...]] = {
    "async": ("--strategy", "async"),
    "ssp": ("--strategy", "ssp", "--staleness", "3"),
    "sync": ("--strategy", "sync"),
    "prefetch": ("--strategy", "async", "--prefetch"),
    "tcp": ("--strategy", "async", "--transport", "tcp"),
}
ENDLESS = 10**9
START_SECONDS = 150.0
"""Processes import torch for half a minute where all cores are busy."""
END_SECONDS = 150.0
"""A stopped worker is given up after 15 s, a stopped job saved within 60; no step takes as long."""


@dataclass(frozen=True)
class Plan:
    """One job and what happens to it, all of it drawn from one seed.

    Attributes:
        seed: the number.
        mode: one of `MODES`.
        workers: how many; an even number in rounds, whose means are halves then, and exact.
        restarts: of `--max-restarts`.
        steps: the last step; `ENDLESS` where the job is interrupted.
        faults: at which second, to which worker, which signal, and for stops after how many
            seconds SIGCONT follows; never where that is None.
        seconds: within how many all of them happen; after these an endless job is interrupted.
    """

    seed: int
    mode: str
    workers: int
    restarts: int
    steps: int
    faults: tuple[tuple[float, int, signal.Signals, float | None], ...]
    seconds: float

    @classmethod
    def draw(cls, seed: int) -> Plan:
        """Returns the plan of a seed; modes come in turn."""
        dice = random.Random(seed)
        mode = list(MODES)[seed % len(MODES)]
        workers = 2 if mode == "sync" else dice.choice((2, 3))
        restarts = dice.choice((0, 100))
        # Where nobody starts workers again, worker 0 or the last one is spared, and goes on alone.
        spared = dice.choice((0, workers - 1))
        targets = [w for w in range(workers) if restarts or w != spared]
        seconds = dice.uniform(8.0, 30.0)
        faults = []
        for _ in range(dice.randint(1, 6)):
            kill = dice.random() < 0.5
            number = signal.SIGKILL if kill else signal.SIGSTOP
            pause = dice.choice((0.05, 0.5, 2.0, 12.0, None)) if not kill else None
            faults.append((dice.uniform(0.0, seconds), dice.choice(targets), number, pause))
        steps = ENDLESS if dice.random() < 0.5 else dice.randint(2000, 8000)
        return cls(seed, mode, workers, restarts, steps, tuple(sorted(faults)), seconds)

    def __str__(self) -> str:
        end = "until SIGTERM" if self.steps == ENDLESS else f"{self.steps} steps"
        kinds = Counter(number.name for _, _, number, _ in self.faults)
        planned = ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))
        return (
            f"job {self.seed}: {self.mode}, {self.workers} workers, {self.restarts} restarts, "
            f"{end}; planned: {planned}"
        )


@dataclass
class Hits:
    """What was really done to each worker: kills and stops, by its index."""

    kills: Counter[int] = field(default_factory=Counter)
    stops: Counter[int] = field(default_factory=Counter)
    halted: set[int] = field(default_factory=set)  # whose last signal was SIGSTOP

    def of(self, worker: int) -> int:
        """How often a worker was hit."""
        return self.kills[worker] + self.stops[worker]


# One job -----------------------------------------------------------------------------------------


def run(plan: Plan, directory: Path) -> str:
    """Runs a job, and returns a line of what it did.

    Raises:
        AssertionError: something is not as it has to be.
    """
    with clean_shell(directory) as shell:
        running = shell.start(
            *("run", "--ps", 2, "--workers", plan.workers, *MODES[plan.mode]),
            *("--max-restarts", plan.restarts, "--run-dir", "run", PROGRAMS / "counting.py"),
            *("--out", "out", "--max-steps", plan.steps, "--pause", 0.001),
        )
        try:
            hits = inject(plan, shell, running)
            ended = running.ended(END_SECONDS, progress="(global ")
            data = check(plan, shell, ended, hits)
        except BaseException:
            logs = sorted((directory / "run" / "logs").glob("*.log"))
            for log in logs:
                last = log.read_text(errors="replace").splitlines()[-12:]
                print(f"  {log.name}:", *last, sep="\n    ")
            raise
    restarted = ended.err.count("; started again (")
    kills, stops = sum(hits.kills.values()), sum(hits.stops.values())
    return (
        f"{'unsaved' if data is None else data.step} steps, {kills} killed, {stops} stopped, "
        f"{restarted} started again, status {ended.status}, {ended.seconds:.0f} s"
    )


def inject(plan: Plan, shell: Shell, running: Running) -> Hits:
    """Lets the faults happen while the job runs; returns after the last one, or the job's end."""
    running.until(r"worker:\d+ \| training", START_SECONDS)
    begin, hits = time.monotonic(), Hits()
    due = [(at, worker, number) for at, worker, number, _ in plan.faults]
    for at, worker, number, pause in plan.faults:
        if number is signal.SIGSTOP and pause is not None:
            due.append((at + pause, worker, signal.SIGCONT))
    if plan.steps == ENDLESS:
        due.append((plan.seconds, -1, signal.SIGTERM))
    for at, worker, number in sorted(due, key=lambda entry: entry[0]):
        while (left := begin + at - time.monotonic()) > 0 and running.process.poll() is None:
            time.sleep(min(left, 0.05))
        if running.process.poll() is not None:
            break
        if number is signal.SIGTERM:
            running.send(number)
        else:
            hit(shell, worker, number, hits)
    return hits


def hit(shell: Shell, worker: int, number: signal.Signals, hits: Hits) -> None:
    """Sends a signal to the process that is the worker now, if there is one."""
    if Tasks(shell.directory / "run").send(f"worker:{worker}", number):
        hits.kills[worker] += number is signal.SIGKILL
        hits.stops[worker] += number is signal.SIGSTOP
        (hits.halted.add if number is signal.SIGSTOP else hits.halted.discard)(worker)


# What must be so ---------------------------------------------------------------------------------


def check(plan: Plan, shell: Shell, ended: Ended, hits: Hits) -> CheckpointData | None:
    """Checks the end of a job and its counts; returns its last checkpoint.

    None where nothing could be saved, and the launcher has said so.
    """
    if plan.steps == ENDLESS and ended.status == 1 and "did not save" in ended.err:
        return None  # all workers were down when the launcher was asked to stop
    _, asked, late = ended.err.partition("stopping: the workers have ")
    if asked and len(hits.halted) == plan.workers and "was given up and killed" in late:
        # Every worker is stopped and never continued: none is left to save.
        assert ended.status == 1 and "the job failed after" in late, ended.text[-3000:]
        return None
    assert ended.status in ((0, 130) if plan.steps == ENDLESS else (0,)), ended.text[-3000:]
    damaged: list[str] = []
    data = latest(shell.directory / "run", lambda path, error: damaged.append(f"{path}: {error}"))
    assert data is not None and not damaged, f"no good checkpoint: {damaged}"
    bounded = plan.mode == "ssp"  # whose job ends so much earlier as updates are lost at its end
    lost = sum(hits.kills.values()) + sum(hits.stops.values())
    if plan.steps != ENDLESS:
        assert plan.steps - (lost if bounded else 0) <= data.step <= plan.steps, data.step
    rows, counted = updates(data), table(data)
    assert sum(rows) == data.step, f"{rows} do not make {data.step} steps"
    for worker in range(plan.workers):
        check_worker(plan, worker, rows[worker], counted.get(worker, 0), known(shell, worker), hits)
    return data


def known(shell: Shell, worker: int) -> Counter[str]:
    """What a worker has noted; nothing if it never made a step."""
    path = shell.directory / "out" / f"notes-{worker}"
    return notes(shell, worker) if path.exists() else Counter()


def check_worker(
    plan: Plan, worker: int, row: float, counted: int, noted: Counter[str], hits: Hits
) -> None:
    """Checks what is counted of one worker, at three places."""
    what = f"worker {worker}: {row} in the values, {counted} in the table, {dict(noted)} noted"
    if plan.mode == "sync":  # alone in a round it counts whole, and with the other one half
        assert counted / 2 <= row <= counted, what
    else:
        assert row == counted, what
    acknowledged, attempted = noted["applied"], noted["attempted"]
    # With prefetch an answer is noted a step later; the last gradients are not pushed at all.
    slack = 2 if plan.mode == "prefetch" else 0
    assert acknowledged - slack <= counted <= attempted, what
    under_way = attempted - acknowledged - noted["stale"]
    assert under_way <= (hits.of(worker) + 1) * (1 + slack) - 1, what
    if not hits.of(worker) and not slack:
        assert acknowledged == counted == attempted - noted["stale"], what


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=1200.0, help="begin no job after these")
    parser.add_argument("--seed", type=int, default=1, help="of jobs: 1000 * SEED + 0, 1, 2")
    parser.add_argument("--job", type=int, help="run this one alone")
    options = parser.parse_args()
    first = options.job if options.job is not None else 1000 * options.seed
    began, done, failed = time.monotonic(), 0, []
    while time.monotonic() - began < options.seconds:
        plan = Plan.draw(first + done)
        print(plan, flush=True)
        with tempfile.TemporaryDirectory(prefix="trireme-faults-") as directory:
            try:
                print(f"  good: {run(plan, Path(directory))}", flush=True)
            except Exception:
                failed.append(plan.seed)
                print(f"  BAD: seed {plan.seed}", flush=True)
                traceback.print_exc(file=sys.stdout)
        done += 1
        if options.job is not None:
            break
    print(f"{done} jobs in {time.monotonic() - began:.0f} s; bad: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
