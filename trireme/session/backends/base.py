"""The interface of backends, which turn a gradient or a delta into new values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import msgspec
import torch

from trireme.data.intervals import joined
from trireme.data.order import SAME_ORDER
from trireme.errors import Rejected
from trireme.ps.extra import ExtraRequest
from trireme.ps.flat import NamedGroups
from trireme.ps.messages import Leased, LeaseFields, OptimizerSpec, PushFields, Span
from trireme.ps.results import PushResult
from trireme.ps.rule import Rule
from trireme.ps.snapshot import ModelState
from trireme.session.checkpoint import CheckpointData
from trireme.session.checkpoint.restored import JobState
from trireme.session.model.extension import TrainedExtension

if TYPE_CHECKING:
    from trireme.session.model.process_group import ProcessGroup

FirstState: TypeAlias = Callable[[], ModelState | None]  # None but in the chief


class Backend(ABC):
    """Applies a worker's updates: by parameter servers, in its own process, or by a process group.

    An exchange reads the gradients from the model's buffers, and leaves the new values there. Each
    method that communicates raises `JobFailed` once the job is over; `Fenced` where the job
    continues without this worker, which it had given up; and `WaitTimeout` where an answer is
    withheld for too long.
    """

    if TYPE_CHECKING:  # some have them as attributes, some as properties

        @property
        def step(self) -> int:
            """The global step of the values that the last exchange brought."""

        @property
        def stopping(self) -> bool:
            """Whether this worker makes no more updates."""

    bytes_sent: int = 0  # of gradients or deltas to servers, as packed
    bytes_received: int = 0  # of values that servers have answered with
    together: bool = False  # whether all processes make each step together, without servers
    group: ProcessGroup | None = None  # the processes that must all call `mean`
    wants_save: bool = False  # whether the chief requests to save the step of the next exchange
    # whether the last exchange agreed to save its step; None where the chief saves alone
    saves: bool | None = None
    interrupted: bool = False  # whether a signal asks this process, or one of its group, to end
    streams: bool = False
    """Whether the tensors of `saving` can be read within its block only, one at a time, and all
    processes take part in the last save."""
    trains_locally: bool = False  # whether workers' own optimizers make steps between exchanges
    grows: bool = False  # whether the optimizer may get other parameters: see `grow`
    closure: Callable[[], Any] | None = None  # that the optimizer calls in the next step
    returned: Any = None  # what the optimizer's last step returned, where this process makes it
    extension: TrainedExtension | None = None  # the model's extra values; set before `start`

    # -- joining ----------------------------------------------------------------------------------

    @abstractmethod
    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        """Registers the model, the optimizer and the rule, and receives the job's values.

        A worker that is not chief waits until the chief has loaded what `first` returns. After
        `come_back`, local updates since the last exchange are dropped.
        """

    def come_back(self, incarnation: int) -> None:
        """Continues as a new incarnation, after the job had given this worker up; then `start`."""
        raise NotImplementedError(f"{type(self).__name__} cannot come back")

    # -- training ---------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """The global step, with the local steps since the last exchange."""
        return self.step

    @property
    def pending_steps(self) -> int:
        """The number of this worker's steps in the exchange under way, or the next one."""
        return 1

    def begin_step(self) -> None:
        """Synchronises with the processes that make the step together with this one."""

    @abstractmethod
    def push(self, weight: float, **fields: Unpack[PushFields]) -> None:
        """Starts an exchange of gradients that are the mean of `weight` examples; 0: of none."""

    @abstractmethod
    def wait(self) -> PushResult | None:
        """Returns the result of the exchange; None where nothing was exchanged at this step."""

    def complete(self) -> PushResult | None:
        """Exchanges the local updates since the last exchange; returns None if there are none."""
        return None

    @property
    def brought(self) -> Any:
        """The extra values that the last push wanted, after `wait`; None where none came."""
        return None

    def pull_extra(self, request: ExtraRequest) -> Any:
        """Returns the extra values that a request wants."""
        raise NotImplementedError(f"{type(self).__name__} has no extra values")

    def mean(self, values: Mapping[str, float], *, counts: bool) -> dict[str, float]:
        """Returns means over the processes of `group`, which all call it; else these values."""
        if self.group is None:
            return dict(values)
        named: dict[str, list[float]] = {}
        for data in self.group.exchange(msgspec.msgpack.encode(dict(values) if counts else {})):
            for name, value in msgspec.msgpack.decode(data, type=dict[str, float]).items():
                named.setdefault(name, []).append(value)
        return {name: sum(found) / len(found) for name, found in named.items()}

    def write_values(self, values: Mapping[str, torch.Tensor], digest: int = 0) -> None:
        """Gives servers the values that the program has written; in a round all have one digest."""

    def grow(self, digest: int) -> None:
        """Takes over the parameters that the trained model has now."""
        raise NotImplementedError(f"{type(self).__name__} trains the parameters that it began with")

    def add_parameters(self, groups: NamedGroups, optimizer: OptimizerSpec) -> None:
        """Takes over the optimizer's groups from servers, with the job's values of all."""
        raise NotImplementedError(f"{type(self).__name__} has no servers")

    # -- agreement in the job --------------------------------------------------------------------

    @abstractmethod
    def lease(
        self, dataset: str, size: int, batch: int, count: int, **fields: Unpack[LeaseFields]
    ) -> Leased:
        """Leases the next examples of a data set: `count` spans of `batch` examples.

        An empty span says that this replica has no examples in a step that others make. With a
        size of 0 the answer says how far a data set is. Raises `Rejected` where workers disagree
        about the data set, or the checkpoint is of another one.
        """

    def compare_data(self, dataset: str, size: int, batch: int, order: int) -> None:
        """Checks that the processes of `group`, which all call it, deal one data set alike."""
        if self.group is None:
            return
        mine = msgspec.msgpack.encode((dataset, size, batch, order))
        for rank, other in enumerate(self.group.exchange(mine)):
            if other != mine:
                theirs = msgspec.msgpack.decode(other, type=tuple[str, int, int, int])
                raise Rejected(
                    f"rank {rank} deals {theirs[0]!r} ({theirs[1]} examples, batches of "
                    f"{theirs[2]}), and rank {self.group.rank} {dataset!r} ({size} examples, "
                    f"batches of {batch}), or they deal in different orders: every process must "
                    f"load the same data. Or {SAME_ORDER}"
                )

    @abstractmethod
    def stop(self, reason: str) -> int:
        """Requests the end of the job; returns the global step at which it will end."""

    def share(self, topic: str, data: bytes) -> None:
        """Shares bytes with the other workers under a topic, in place of earlier ones."""

    def collect(self, topic: str) -> dict[int, bytes]:
        """Returns the bytes that each worker has shared under a topic."""
        return {}

    @abstractmethod
    def snapshot(self, *, state: bool) -> ModelState:
        """Copies the values of one step, in all processes that hold the model together."""

    @contextmanager
    def saving(self) -> Iterator[ModelState]:
        """Yields the state to be saved, as `snapshot` returns it.

        With `streams` each tensor comes from the process that holds it when it is read; other
        processes than the chief get a state without tensors.
        """
        yield self.snapshot(state=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts the values to evaluate into the parts of the model while all processes evaluate."""
        yield

    def leave_state(self) -> None:
        """Shares the state of this worker's own optimizer, right after an exchange."""

    def states(self, step: int) -> dict[str, torch.Tensor]:
        """Returns the shared states of all workers' optimizers, by `WORKER/PARAMETER/STATE`."""
        return {}

    def hand_out_states(self, data: CheckpointData, then: JobState, workers: int) -> str:
        """Shares, as chief, a checkpoint's states of workers' own optimizers; returns a warning."""
        return ""

    def take_state(self) -> bool:
        """Restores what `hand_out_states` has shared; returns False where there is none to take."""
        return True

    def end(self) -> None:
        """Makes `stopping` true for this worker alone: the job goes on without it."""
        raise NotImplementedError(f"{type(self).__name__} keeps its workers")

    # -- leaving ----------------------------------------------------------------------------------

    def retire(self) -> None:
        """Announces that this worker makes no more updates: no other worker waits for it."""

    @abstractmethod
    def drain(self) -> int:
        """Waits until every worker has retired; receives the final values, returns their step."""

    def close(self) -> None:
        """Closes connections and threads. May be called again."""


def joined_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Returns the same examples in the fewest spans."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for span in spans:
        ranges.setdefault(span.dataset, []).append((span.start, span.stop))
    return tuple(
        Span(dataset, start, stop)
        for dataset, found in ranges.items()
        for start, stop in joined(found)
    )
