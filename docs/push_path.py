"""Follows one push through the program, from `session.step` to the new values.

    python docs/push_path.py           print the functions that a push passes through
    python docs/push_path.py --one     with one server, without copies

A whole job runs in threads of this process: one asynchronous worker, and two servers with two
copies of each shard, or one server, over TCP. After some steps one is traced. The path of the push
is every function that was being executed when the push reached one of its stations (`STATIONS`):
they hand it on from one to the next. What these functions consult on the way, such as a clock or a
counter, is not on the path; the number of all functions that were entered is printed too.

The path is that of the push to shard 0, whose primary is at ps:0 and whose backup is at ps:1.

docs/build.py writes the list and the drawing of docs/architecture.md from this.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "trireme"
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

import torch  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from tests.harness import Cluster, run_job  # noqa: E402
from trireme import Session  # noqa: E402

STEPS, TRACED = 24, 8
COPIES = Cluster(1, 2, strategy="async", scheme="tcp", policy={"replicas": 2})
ONE = Cluster(1, 1, strategy="async", scheme="tcp")


@dataclass(frozen=True)
class Station:
    """Where a push must come by.

    Attributes:
        title: what happens there.
        task: in which task.
        function: the function that does it, by its qualified name.
        below: a function that must be among its callers; empty for any.
        beside: one that must not; empty for none.
        copied: whether it is there with copies only.
    """

    title: str
    task: str
    function: str
    below: str = ""
    copied: bool = False
    beside: str = ""


STATIONS = (
    Station("the push is given its sequence number", "worker:0", "ClientProtocol.push"),
    Station("the gradient is sent", "worker:0", "SocketStream.write"),
    Station("the gradient arrives", "ps:0", "SocketStream.read_into", "Connection.poll"),
    Station("the push becomes an entry of the log", "ps:0", "ReplicationLog.append", copied=True),
    Station("the entry is sent to the backup", "ps:0", "SocketStream.write", copied=True),
    Station("the shard holds the push", "ps:0", "Follower.hold", copied=True),
    Station("another shard reports that it holds its part", "ps:0", "Leader.hear", copied=True),
    Station("the leader decides to apply the push", "ps:0", "Leader._single", copied=True),
    Station("the other shard is told the decision", "ps:0", "Leader.tell", copied=True),
    Station("the update is applied", "ps:0", "SegmentOptimizer.step", "Replica._happen"),
    Station("the verdict is remembered", "ps:0", "PushTable.decide", "Replica._happen"),
    Station("the answer is withheld", "ps:0", "ReplicationLog.hold", copied=True),
    Station(
        "the entry arrives, later that of the decision",
        "ps:1",
        "SocketStream.read_into",
        "Connection.poll",
        True,
    ),
    Station(
        "the backup decides alike, and applies",
        "ps:1",
        "SegmentOptimizer.step",
        "Replica.replicate",
        True,
    ),
    Station(
        "the backup confirms the entry",
        "ps:1",
        "SocketStream.write",
        "ShardHandler.turn_over",
        copied=True,
    ),
    Station("the confirmation releases the answer", "ps:0", "ReplicationLog.confirm", copied=True),
    Station(
        "the answer is sent, with the new values",
        "ps:0",
        "SocketStream.write",
        beside="ShardHandler._send",  # that sends the decision to the other shard
    ),
    Station("the values arrive", "worker:0", "SocketStream.read_into", "Connection.poll"),
    Station("the model has the new values", "worker:0", "FlatModel.publish_values"),
)
"""In the order of time, within each task: the primary and its backup work at the same time."""

STARTS = {"worker:0": "Session.step", "ps:0": "Service._turn", "ps:1": "Service._turn"}
"""The functions at which the path begins in each task."""


@dataclass(frozen=True)
class Hop:
    """A function that a push passes through.

    Attributes:
        task: in which task.
        file: in which file of `trireme/`.
        function: its qualified name.
    """

    task: str
    file: str
    function: str


@dataclass
class PushPath:
    """The path of a push.

    Attributes:
        legs: for each station the hops that are new on the way to it, in the order of the calls.
        entered: every function that was entered meanwhile, on the path or beside it.
    """

    legs: dict[Station, list[Hop]] = field(default_factory=dict)
    entered: set[Hop] = field(default_factory=set)

    @property
    def hops(self) -> list[Hop]:
        """The hops of all legs."""
        return [hop for leg in self.legs.values() for hop in leg]

    @property
    def files(self) -> set[str]:
        """The files of all hops."""
        return {hop.file for hop in self.hops}


class _Tracer:
    """Notes the calls within the package while it is on."""

    def __init__(self, stations: Sequence[Station]) -> None:
        self.stations = stations
        self.on = False
        self.begun = 0
        self.path = PushPath()
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether the push has come by every station."""
        return all(station in self.path.legs for station in self.stations)

    def begin(self) -> None:
        """Begins to note the calls of a step."""
        self.begun += 1
        self.path = PushPath()
        self.on = True

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.on or event != "call":
            return
        task = threading.current_thread().name
        hop = _hop(task, frame.f_code)
        if hop is None or task not in STARTS:
            return
        with self._lock:
            self.path.entered.add(hop)
            station = self._next(task)
            if station is None or station.function != hop.function:
                return
            calls = list(_calls(task, frame))
            functions = {call.function for call in calls}
            if station.beside not in functions and (
                not station.below or station.below in functions
            ):
                known = set(self.path.hops)
                self.path.legs[station] = [call for call in calls if call not in known]

    def _next(self, task: str) -> Station | None:
        mine = (station for station in self.stations if station.task == task)
        return next((station for station in mine if station not in self.path.legs), None)


def _hop(task: str, code: CodeType) -> Hop | None:
    file = Path(code.co_filename)
    if not file.is_relative_to(PACKAGE) or code.co_name.startswith("<"):
        return None
    return Hop(task, str(file.relative_to(PACKAGE)), code.co_qualname)


def _calls(task: str, frame: FrameType) -> Iterator[Hop]:
    """Yields the functions that are being executed, from the start of the path."""
    frames: list[FrameType] = []
    at: FrameType | None = frame
    while at is not None:
        frames.append(at)
        if at.f_code.co_qualname == STARTS[task]:
            break
        at = at.f_back
    for each in reversed(frames):
        hop = _hop(task, each.f_code)
        if hop is not None:
            yield hop


def follow(cluster: Cluster = COPIES) -> PushPath:
    """Runs a job, and returns the path of one of its pushes.

    Raises:
        RuntimeError: the push did not come by a station.
    """
    stations = [each for each in STATIONS if cluster is COPIES or not each.copied]
    tracer = _Tracer(stations)
    model = torch.nn.Linear(4, 2)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))

    def make(worker: int) -> Session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Session(model, torch.nn.MSELoss(), optimizer, max_steps=STEPS)

    def program(session: Session) -> None:
        for number, batch in enumerate(session.loader(data, batch_size=4)):
            # Of a step that is not like others, such as one that waits for a server, the next one.
            if number >= TRACED and not tracer.is_complete:
                tracer.begin()
            session.step(batch)
            tracer.on = False

    threading.setprofile(tracer)
    try:
        ran = run_job(cluster, make, program)
    finally:
        threading.setprofile(None)
    if ran.raised:
        raise ran.raised[0]
    missing = [station for station in stations if station not in tracer.path.legs]
    if missing:
        tasks = [hop.task for hop in tracer.path.entered]
        seen = ", ".join(f"{tasks.count(task)} in {task}" for task in STARTS)
        raise RuntimeError(
            f"the push did not come by {missing[0].function}: {missing[0].title}; "
            f"{tracer.begun} steps were traced, and the last one entered functions: {seen}"
        )
    path = tracer.path
    path.legs = {station: path.legs[station] for station in stations}
    return path


WHERE = {"worker:0": "worker", "ps:0": "primary", "ps:1": "backup"}
"""What each task is on the path."""


def count(path: PushPath) -> str:
    """Returns one sentence with the number of functions and files."""
    functions = {(hop.file, hop.function) for hop in path.hops}
    copies = any(station.copied for station in path.legs)
    how = "two copies of each shard" if copies else "one server"
    return (
        f"These are {len(functions)} functions in {len(path.files)} files: asynchronous training "
        f"over TCP with {how}."
    )


def listing(path: PushPath) -> str:
    """Returns the path as a list in Markdown: the stations, and under each its hops."""
    lines = []
    for number, (station, leg) in enumerate(path.legs.items(), 1):
        where = WHERE[station.task]
        lines += [f"{number}. **{station.title[0].upper()}{station.title[1:]}** ({where})"]
        if not leg:
            lines += ["   - by functions that stand above"]
        lines += [f"   - `{hop.function}` ({hop.file})" for hop in leg]
    return "\n".join([*lines, "", count(path)])


def main() -> None:
    """Prints the path, and how much is entered beside it, which timing changes a little."""
    path = follow(ONE if "--one" in sys.argv[1:] else COPIES)
    entered = {(hop.file, hop.function) for hop in path.entered}
    print(listing(path))
    print(f"With what they consult, such as counters, the step entered {len(entered)} functions.")


if __name__ == "__main__":
    main()
