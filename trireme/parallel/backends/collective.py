"""Training without parameter servers, by the processes of a process group.

Every process applies the same mean gradient to its part of the parameters, with the user's
optimizer. All processes make the same steps: each computes the next examples from its own copy of
the same ledger.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import torch

from trireme.errors import ConfigurationError
from trireme.parallel.backends.neighbours import Neighbours
from trireme.parallel.backends.tensor_stream import Described, TensorStream, described, metas
from trireme.parallel.model_part import MeshPart
from trireme.parallel.processes.large_values import LargeValues
from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.parallel.processes.straggler_watch import StragglerWatch
from trireme.parallel.shared_writes import SharedWrites
from trireme.ps.messages import OptimizerSpec, Span
from trireme.ps.results import PushResult
from trireme.ps.rule import Rule
from trireme.ps.snapshot import ModelState
from trireme.session.backends.base import FirstState, joined_spans
from trireme.session.backends.local import KINDS, Local, unpacked
from trireme.session.checkpoint.streamed import StreamedTensors, joined, renamed, shapes_of
from trireme.session.model.trained import clip
from trireme.session.model.training_setup import TrainingSetup
from trireme.tensors import full_tensor
from trireme.writes.watched_writes import WatchedWrites

_REASON_SECONDS = 5.0


class _Action(enum.Enum):
    """An action that all processes must take together, as the verb of a sentence."""

    STEP = "makes a step"
    VALUES = "evaluates"
    EVALUATE = "evaluates its part"
    STATE = "saves"
    OPEN = "begins to read a data set"
    MEAN = "records"
    END = "ends its training"


_ACTIONS = tuple(_Action)
_UNEVEN = ({_Action.STEP, _Action.END}, {_Action.STEP, _Action.OPEN})
"""What processes do apart that have not made the same number of steps."""


class Collective(Local):
    """One process of a group that trains without servers."""

    group: TorchProcessGroup
    together = True

    def __init__(
        self,
        group: TorchProcessGroup,
        setup: TrainingSetup,
        waiting: Callable[[str, Sequence[str], float], None],
        doing: Callable[[], tuple[str, str]],
    ) -> None:
        options = setup.settings.options
        super().__init__(setup.trained, setup.optimizer, group.mesh.replicas, group.replica)
        self.saves = False
        self.group = group
        self._clip_norm = options.clip_norm
        self._agree_on_skips = options.nan == "skip"  # a batch of one process may be left out
        self._watch = StragglerWatch(
            group,
            waiting,
            timeouts=setup.settings.task.config.timeouts,
            doing=doing,
            used=Neighbours(group.rank, group.put, group.get).used,
        )
        group.explain_by(self._watch.reason)
        group.waiting = self._watch.waiting
        self._shared = LargeValues(group.put, group.get)
        self._wants_stop = False
        self._writes: SharedWrites | None = None
        if setup.settings.mesh.pp == 1 and not setup.settings.placed:  # each has all parameters
            part = setup.part
            loaded = part.loaded if isinstance(part, MeshPart) else None
            self._writes = SharedWrites(setup.trained, loaded=loaded)
            own_writes = setup.own_writes
            assert isinstance(own_writes, WatchedWrites)
            own_writes.watches.append(self._writes)
        self._grown = (0.0, 0.0, 0.0)  # a vote: whether the parameters are others, and a digest
        group.judge = self._judge
        self._vote_totals: Callable[[], list[float]] | None = None
        self._last: ModelState | None = None
        self.streams = setup.lean

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        self._watch.start()
        super().start(optimizer, rule, first)

    def _agreed(self, state: ModelState | None) -> ModelState:
        """Hands the chief's state to every process, one tensor at a time: each keeps its part."""
        named: Mapping[str, torch.Tensor] = {}
        head = b""
        if state is not None:
            kinds = zip(KINDS, (state.values, state.average, state.optimizer), strict=True)
            named = joined(
                *(renamed(of, {f"{kind}/{name}": name for name in of}) for kind, of in kinds)
            )
            bare = replace(state, values={}, average={}, optimizer={}, extra={})
            head = msgspec.msgpack.encode((bare, described(shapes_of(named))))
        data = self.group.broadcast(head if self.group.is_chief else None)
        found, about = msgspec.msgpack.decode(data, type=tuple[ModelState, Described])
        held: dict[str, torch.Tensor] = {}
        for key, shape in metas(about).items():
            chief = self.group.is_chief
            tensor = named[key].contiguous() if chief else torch.empty_like(shape, device="cpu")
            if tensor.numel():  # as bytes: not every dtype can be sent
                self.group.broadcast_tensor(tensor.detach().view(-1).view(torch.uint8))
            if self._holds(key):
                held[key] = tensor
        values, average, optimizer = unpacked(held)
        return replace(found, values=values, average=average, optimizer=optimizer)

    def _holds(self, key: str) -> bool:
        if self.grows:
            return True  # also what a checkpoint has of parameters to come
        kind, _, name = key.partition("/")
        parameter = name.rpartition("/")[0] if kind == "state" else name
        return parameter in self._held.parameters

    def _agree(self, action: _Action) -> None:
        """Takes part in the chief's actions, such as saving, until the chief takes this one too."""
        if not self.group.mesh.sharded:
            return
        word = torch.tensor([_ACTIONS.index(action)])
        while True:
            self.group.broadcast_tensor(word)
            chief = _ACTIONS[int(word)]
            if chief == action:
                return
            if chief == _Action.EVALUATE:
                raise ConfigurationError(
                    f"the chief evaluates at step {self.step}, and rank {self.group.rank} "
                    f"{action.value}: no process holds the whole model (GraphConfig(example=...)), "
                    "so that every process must call session.evaluate, with the same data"
                )
            if chief not in (_Action.VALUES, _Action.STATE):
                uneven = {chief, action} in _UNEVEN
                if uneven and (reason := self._watch.reason(_REASON_SECONDS)) is not None:
                    raise reason  # in the words of all processes
                raise ConfigurationError(
                    f"rank {self.group.rank} {action.value} at step {self.step}, and the "
                    f"chief {chief.value}: every process must run the same program; "
                    "an action of one process alone must be the chief's"
                )
            if chief == _Action.STATE:
                with self._streamed():
                    pass
            else:
                self._gather(state=False)

    def grow(self, digest: int) -> None:
        super().grow(digest)
        short = float(digest & 0xFFFF)
        self._grown = (1.0, short, short**2)

    def _judge(self, totals: Sequence[float]) -> None:
        """Checks that all processes have changed the same."""
        stop, _, _, *numbers = totals
        if not stop and self._writes is not None:  # one that has ended writes nothing any more
            self._writes.agree(numbers[:4], self.group.size, self.group.total)
        count, digests, squares, *settings = numbers[4:]
        if count and (count < self.group.size or digests**2 != squares * count):
            raise ConfigurationError(
                f"{count:.0f} of {self.group.size} processes have given their optimizer other "
                "parameters since the last step, or unfrozen some, and not all of them the same "
                "ones with the same values: do so in every process, at the same step, and seed "
                "torch before new layers are built"
            )
        steps, digests, squares = settings
        if digests**2 != squares * steps:
            raise ConfigurationError(
                f"rank {self.group.rank} and others step with other settings of the optimizer, "
                f"here {self._present}: their values would drift apart. Who sets them by a loss of "
                "its own, as ReduceLROnPlateau does, must do so by one that all processes share"
            )

    def _settings(self) -> list[float]:
        """Returns votes: whether this process makes a step, and a digest of the settings."""
        if self._writes is None:
            return [0.0] * 3
        kinds = int, float, tuple
        self._present = ", ".join(
            f"{name} {value}"
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if isinstance(value, kinds)
        )
        # Few bits: sums of squares stay exact, whatever the number of processes.
        short = float(zlib.crc32(self._present.encode()) & 0xFFFF)
        return [1.0, short, short**2]

    def begin_step(self) -> None:
        self._watch.step_began(self.step)
        votes = self._wants_stop, self.wants_save, self.interrupted
        written = [0.0] * 4 if self._writes is None else self._writes.votes()
        self.group.votes = [*map(float, votes), *written, *self._grown, *self._settings()]
        self._grown = (0.0, 0.0, 0.0)
        self._agree(_Action.STEP)

    def _apply(self, examples: Sequence[Span], *, skip: bool) -> None:
        if self._agree_on_skips:
            skip = self.group.total([float(skip)])()[0] > 0
        self._vote_totals = self.group.vote()
        if self._writes is not None:
            self._writes.end_of_step()
        if not skip and self._clip_norm is not None:
            clip(self._held, self._clip_norm)
        super()._apply(examples, skip=skip)

    def wait(self) -> PushResult:
        """Returns the verdict `Applied`; all processes agree on whether that was the last step."""
        assert self._vote_totals is not None, "there was no exchange to end"
        totals = self._vote_totals()
        stop, save, interrupted = totals[:3]
        self._vote_totals = None
        self._judge(totals)
        result = super().wait()
        self._watch.step_ended(self.step)
        self.saves = save > 0
        self.stopping |= stop > 0
        self.interrupted |= interrupted > 0
        return msgspec.structs.replace(result, stop=self.stopping)

    def compare_data(self, dataset: str, size: int, batch: int, order: int) -> None:
        with self._watch.waiting(_Action.OPEN.value):
            self._agree(_Action.OPEN)
            super().compare_data(dataset, size, batch, order)

    def stop(self, reason: str) -> int:
        """Requests the end of the job after the next step; returns that step."""
        self._wants_stop = True
        return self.step + 1

    def _end_together(self) -> None:
        self._watch.ended(self.step)
        self._agree(_Action.END)
        self._watch.meet_at_the_end()

    def retire(self) -> None:
        """Waits until the other processes have made their last step too."""
        self._end_together()
        self.group.total([0.0])()  # waits for all processes

    def drain(self) -> int:
        """Keeps the final state, which a single process may then copy; returns its step.

        Where no process holds the whole model nothing is kept: all processes save together.
        """
        self._end_together()
        if not self.streams:
            self._last = self._gather(state=True)
        return self.step

    def share(self, topic: str, data: bytes) -> None:
        self._shared.put(f"{topic}/{self.group.rank}", data)

    def collect(self, topic: str) -> dict[int, bytes]:
        found = {rank: self._shared.get(f"{topic}/{rank}") for rank in range(self.group.size)}
        return {rank: data for rank, data in found.items() if data is not None}

    def mean(self, values: Mapping[str, float], *, counts: bool) -> dict[str, float]:
        self._agree(_Action.MEAN)
        return super().mean(values, counts=counts)

    def snapshot(self, *, state: bool) -> ModelState:
        if self._last is not None:
            return self._last
        self._agree(_Action.STATE if state else _Action.VALUES)
        return self._gather(state=state)

    def _gather(self, *, state: bool) -> ModelState:
        tensors, lacks = self._tensors(state=state)
        # All processes join shards in the same order: sorted, as names read from a file may not be.
        mine = {name: full_tensor(tensors[name]).clone() for name in sorted(tensors)}
        consumed = self._all_consumed() if state else ()
        return self._state(self.group.joined(mine), consumed, lacks)

    @contextmanager
    def saving(self) -> Iterator[ModelState]:
        if not self.streams:
            yield self.snapshot(state=True)
            return
        self._agree(_Action.STATE)
        with self._streamed() as state:
            yield state

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self._agree(_Action.EVALUATE)
        held = self._trained() if self._average else []
        own = [parameter.detach().clone() for _, parameter in held]
        with torch.no_grad():
            for name, parameter in held:
                parameter.copy_(self._average[name])
        try:
            with self._watch.waiting():  # the model's parts compute together
                yield
        finally:
            with torch.no_grad():
                for (_, parameter), value in zip(held, own, strict=True):
                    parameter.copy_(value)

    @contextmanager
    def _streamed(self) -> Iterator[ModelState]:
        """Yields the state, whose tensors the others send one at a time; none of it elsewhere."""
        tensors, lacks = self._tensors(state=True)
        head = self._state({}, self._all_consumed(), lacks)
        stream = TensorStream(self.group, tensors)
        if not self.group.is_chief:
            stream.serve()
            yield head
            return
        everything = StreamedTensors(stream.shapes, stream.read)
        values, average, optimizer = (
            renamed(everything, {key.partition("/")[2]: key for key in keys})
            for keys in ([k for k in stream.shapes if k.startswith(f"{kind}/")] for kind in KINDS)
        )
        try:
            yield replace(head, values=values, average=average, optimizer=optimizer)
        finally:
            stream.close()

    def _all_consumed(self) -> tuple[Span, ...]:
        everyones = self.group.exchange(msgspec.msgpack.encode(self._ledgers.consumed()))
        return joined_spans(
            span for data in everyones for span in msgspec.msgpack.decode(data, type=list[Span])
        )

    def close(self) -> None:
        self._watch.close()  # the lifecycle closes the process group
