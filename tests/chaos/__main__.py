"""Disturbs a job at random, for as long as told, and counts what became of each update.

    python -m tests.chaos --seconds 420 --seed 1      make chaos does this
    python -m tests.chaos --faults "kill worker,stop worker"

It runs the same program twice, on three servers and three workers: undisturbed, and with a fault
every ten seconds, each when the job has become whole again after the one before. Then it compares:

- each incarnation of a worker: acknowledged <= applied <= attempted, at every server, and equal for
  those that lived to the end; applied in the values is applied in the exactly-once table;
- the accuracy, which may differ by half a point, or by three standard errors of two such counts;
- how long nothing is acknowledged where only silence tells of a fault: two deadlines at most;
- the updates a second, of which three quarters have to be left of the time without what processes
  take to start, and without the deadline where nothing but silence tells of a fault.

The seed decides which faults come in which order. What a process does at that time it does not, so
that a seed repeats the kind of a run, and not every interleaving.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from examples.images import mnist
from tests.chaos.accounts import (
    Account,
    Goodput,
    Struck,
    accounts,
    acknowledged_at,
    fault_table,
    goodput,
    longest_gap,
    unanswered,
)
from tests.chaos.faults import FAULTS, SHOWN, Bag, Fault
from tests.chaos.job import Job, Size, counted
from tests.chaos.program import Counted
from tests.faults.hosts import Network, NoHosts, network
from tests.integration.conftest import clean_shell
from trireme.ps.messages import WorkerProgress
from trireme.session.checkpoint import CheckpointData

HOSTS = ("alder", "birch", "cedar", "damson")
ACCURACY_POINTS = 0.5
TEST_IMAGES = 10_000
LEAST_GOODPUT = 0.75


@dataclass(frozen=True)
class Outcome:
    """What a run has left.

    Attributes:
        goodput: of the time from the start until the request to stop.
        accuracies: on the test set, in percent, by the global step of the checkpoint.
        accounts: of each incarnation.
        struck: the faults.
        heard: when updates were acknowledged.
        retried: how often a push was sent to a server again.
        problems: what is not as it has to be.
    """

    goodput: Goodput
    accuracies: dict[int, float]
    accounts: dict[tuple[int, int], Account]
    struck: list[Struck]
    heard: list[float]
    retried: int
    problems: list[str]


def say(text: str) -> None:
    print(text, flush=True)


# One run -----------------------------------------------------------------------------------------


def run(
    options: argparse.Namespace,
    seconds: float,
    faults: list[Fault],
    hosts: Network | None,
    once: bool = False,
) -> Outcome:
    """Runs a job for so many seconds, with faults or without, and counts.

    Args:
        options: of the command line.
        seconds: how long.
        faults: which faults to make; none for a quiet run.
        hosts: where tasks are; None for all on this one.
        once: whether to end when each fault was made, and the job has gone on for an interval.

    Raises:
        AssertionError: the job fails, or hangs, or leaves something behind.
    """
    size = Size(options.servers, options.workers, options.replicas)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="trireme-chaos-"))
        shell = stack.enter_context(clean_shell(Path(directory)))
        job = Job(shell, hosts, size, options.deadline)
        try:
            tls = ["--tls"] if options.tls else []
            paced = ("--pause", options.pause)
            job.start(options.data, [*options.options.split(), *tls], paced)
            before = sum(job.server_starts.values())
            start = time.monotonic()
            struck = disturb(job, faults, seconds, options, once)
            stop = time.monotonic()
            ended = job.end()
            assert ended.status in (0, 130), f"status {ended.status}: {ended.text[-3000:]}"
            assert "the whole job starts again" not in ended.err, "the job began anew"
            others = sum(job.server_starts.values()) - before
            outcome = judge(options, job, (start, stop), others, struck)
            if outcome.problems:
                show_logs(job)
            return outcome
        except BaseException:
            show_logs(job)
            raise


def disturb(
    job: Job, faults: list[Fault], seconds: float, options: argparse.Namespace, once: bool = False
) -> list[Struck]:
    """Lets the time pass; makes faults meanwhile, each when the job is whole again."""
    bag, begin, struck = Bag(faults, options.seed), time.monotonic(), list[Struck]()
    due, end = begin + options.interval, begin + seconds
    while (now := time.monotonic()) < end:
        if not faults or now < due or due + options.interval > end:
            time.sleep(max(0.0, min(0.1, end - now)))
            continue
        job.wait_until_whole()
        status = job.status()
        drawn = None if status is None else bag.draw(job, status)
        if drawn is not None:
            struck.append(strike(job, *drawn, begin))
        due = max(due + options.interval, time.monotonic())
        if once and {each.fault for each in struck} == {fault.name for fault in faults}:
            due, end = end, min(end, time.monotonic() + options.interval)  # and no further one
    return struck


def strike(job: Job, fault: Fault, target: str, begin: float) -> Struck:
    at, pid = time.monotonic(), job.pid(target)
    fault.strike(job, target)
    over = job.wait_until_whole(None if pid is None else (target, pid))
    say(f"  {at - begin:6.1f} s  {fault.name}: {target}; whole after {over - at:.1f} s")
    return Struck(fault.name, target, at, over)


def show_logs(job: Job) -> None:
    for log in sorted((job.run_dir / "logs").glob("*.log")):
        last = log.read_text(errors="replace").splitlines()[-12:]
        print(f"  {log.name}:", *last, sep="\n    ")


# What it has left --------------------------------------------------------------------------------


def judge(
    options: argparse.Namespace,
    job: Job,
    part: tuple[float, float],
    server_starts: float,
    struck: list[Struck],
) -> Outcome:
    """Counts what a run has left."""
    notes, saved = job.notes(), job.saved()
    data = saved[-1]
    found = accounts(notes, counted(data))
    problems = [
        f"worker:{worker}, incarnation {incarnation}: {problem} ({account})"
        for (worker, incarnation), account in found.items()
        if (problem := account.problem())
    ]
    problems += compare_with_table(found, data)
    return Outcome(
        goodput=goodput(notes, *part, server_starts, len(os.sched_getaffinity(0))),
        accuracies=measure(saved, options.data),
        accounts=found,
        struck=struck,
        heard=acknowledged_at(notes),
        retried=sum(note.what == "retried" for note in notes),
        problems=problems,
    )


def compare_with_table(found: dict[tuple[int, int], Account], data: CheckpointData) -> list[str]:
    """Compares the values with the exactly-once table, and with the number of global steps."""
    rows = msgspec.convert(data.state["pushes"], list[WorkerProgress])
    table = {row.worker: row.applied for row in rows}
    values: dict[int, float] = {}
    for (worker, _), account in found.items():
        values[worker] = values.get(worker, 0.0) + account.applied[0]
    problems = [
        f"worker:{worker}: {values.get(worker, 0):.0f} updates in the values, "
        f"{table.get(worker, 0)} in the exactly-once table"
        for worker in sorted({*values, *table})
        if values.get(worker, 0) != table.get(worker, 0)
    ]
    if sum(values.values()) != data.step:
        problems.append(f"{sum(values.values()):.0f} updates make {data.step} global steps")
    return problems


def measure(saved: list[CheckpointData], directory: Path) -> dict[int, float]:
    """Returns the accuracy of each checkpoint on the test set, in percent."""
    model = Counted()
    images, labels = mnist.load(directory)[2].tensors
    accuracies = {}
    with torch.no_grad():
        for data in saved:
            model.load_state_dict(dict(data.model))
            right = model(images).argmax(1) == labels
            accuracies[data.step] = 100.0 * float(right.float().mean())
    return accuracies


# The report --------------------------------------------------------------------------------------


def report(quiet: Outcome, chaos: Outcome, least: float, deadline: float) -> list[str]:
    """Prints the table, and returns what is not as it has to be.

    Args:
        quiet, chaos: the two runs.
        least: the goodput, as a share of the quiet run's.
        deadline: silent seconds after which a task is lost.
    """
    say("\nfault              count  seconds without progress: median   worst")
    for row in fault_table(chaos.struck, chaos.heard):
        say(f"{row.fault:<18} {row.count:5}  {row.median_stall:32.2f} {row.worst_stall:7.2f}")
    well = sum(not each.problem() for each in chaos.accounts.values())
    say(f"\nincarnations: {len(chaos.accounts)}, whose counts agree: {well}")
    say(f"pushes sent to a server again: {chaos.retried}")
    say(f"updates whose worker never heard of them: {unanswered(chaos.accounts.values())}")
    for name, each in (("quiet", quiet), ("chaos", chaos)):
        good = each.goodput
        say(
            f"{name}: {good.updates} updates in {good.seconds:.0f} s: {good.plain:.1f} a second; "
            f"{good.without_starts():.1f} without the {good.starting:.1f} s of processors that "
            "interpreters took to start"
        )
    problems = [f"quiet: {each}" for each in quiet.problems] + chaos.problems
    silence = sum(
        min(longest_gap(chaos.heard, each.at, each.over), deadline)
        for each in chaos.struck
        if FAULTS[each.fault].silent
    )
    plain, without, ratio = (
        each / quiet.goodput.plain
        for each in (
            chaos.goodput.plain,
            chaos.goodput.without_starts(),
            chaos.goodput.without_starts(silence),
        )
    )
    say(
        f"goodput: {plain:.2f} of the quiet run, {without:.2f} without the starts, "
        f"{ratio:.2f} without the {silence:.1f} s until a deadline told of silence"
    )
    problems += [
        f"{each.fault}: {each.target}: nothing was acknowledged for {stall:.1f} s"
        for each in chaos.struck
        if FAULTS[each.fault].silent
        and (stall := longest_gap(chaos.heard, each.at, each.over)) > 2 * deadline
    ]
    if ratio < least:
        problems.append(f"goodput is {ratio:.2f} of the quiet run, less than {least}")
    return problems + compare_accuracy(quiet.accuracies, chaos.accuracies)


def compare_accuracy(quiet: dict[int, float], chaos: dict[int, float]) -> list[str]:
    """Compares the accuracies after about as many updates, as many as both have made."""
    last = min(max(quiet), max(chaos))
    one, other = (min(each, key=lambda step: abs(step - last)) for each in (quiet, chaos))
    text = (
        f"accuracy {chaos[other]:.2f}% after {other} updates, "
        f"and {quiet[one]:.2f}% after {one} when quiet"
    )
    say(text)
    if abs(one - other) > last / 10:
        say("that is not compared: a longer --quiet has a checkpoint after as many updates")
        return []
    share = quiet[one] / 100
    chance = 300 * math.sqrt(2 * share * (1 - share) / TEST_IMAGES)  # three standard errors
    return [text] if abs(quiet[one] - chaos[other]) > max(ACCURACY_POINTS, chance) else []


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=420.0, help="of the disturbed run")
    parser.add_argument("--quiet", type=float, default=90.0, help="seconds of the quiet run")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between two faults")
    parser.add_argument("--faults", default=",".join(SHOWN), help=f"some of: {', '.join(FAULTS)}")
    default = Path(os.environ.get("TRIREME_DATA", "../shared/data")) / "mnist"
    parser.add_argument("--data", type=Path, default=default, help="the folder of MNIST's files")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--deadline", type=float, default=3.0, help="silent seconds after which a task is lost"
    )
    parser.add_argument(
        "--goodput", type=float, default=LEAST_GOODPUT, help="the least, of the quiet run's"
    )
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--tls", action="store_true", help="encrypt all connections")
    parser.add_argument("--hosts", choices=("auto", "none"), default="auto")
    parser.add_argument(
        "--options", default="--strategy async", help='of trireme run, such as "--strategy ssp"'
    )
    given = parser.parse_args(words)
    given.names = [name.strip() for name in given.faults.split(",") if name.strip()]
    unknown = [name for name in given.names if name not in FAULTS]
    if unknown:
        parser.error(f"there is no fault {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    return given


def main() -> int:
    options = arguments()
    say(f"seed {options.seed}; faults: {', '.join(options.names)}")
    faults = [FAULTS[name] for name in options.names]
    with ExitStack() as stack:
        hosts: Network | None = None
        if options.hosts == "auto":
            try:
                hosts = stack.enter_context(network(HOSTS))
            except NoHosts as error:
                say(f"ALL TASKS ARE ON ONE HOST, and none is cut off: {error}")
        say(f"quiet for {options.quiet:.0f} s")
        quiet = run(options, options.quiet, [], hosts)
        say(f"disturbed for {options.seconds:.0f} s")
        chaos = run(options, options.seconds, faults, hosts)
    problems = report(quiet, chaos, options.goodput, options.deadline)
    never = sorted(set(options.names) - {each.fault for each in chaos.struck})
    if never:
        say(f"never made: {', '.join(never)}")
    for problem in problems:
        say(f"BAD: {problem}")
    say(f"seed {options.seed}: {'BAD' if problems else 'good'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
