"""Training without parameter servers, by the processes of a gang together.

It offers what `trireme.ps.client.Client` offers. Every process applies the same mean gradient to
the part of the parameters that it holds, with the user's own optimizer. All take the same steps:
which examples come next, each works out for itself, from the same ledger.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import nn

from trireme.data.intervals import IntervalSet
from trireme.data.ledger import Ledger
from trireme.errors import ConfigurationError, Rejected
from trireme.parallel.gang import Gang
from trireme.parallel.local import local
from trireme.parallel.part import join
from trireme.parallel.sharding import take, whole
from trireme.parallel.watch import Watch
from trireme.ps.ending import after_the_end
from trireme.ps.examples import resized
from trireme.ps.local import check_complete, state_names
from trireme.ps.messages import Applied, GroupSpec, Lease, OptimizerSpec, Span
from trireme.ps.optim import check_optimizer
from trireme.ps.results import PullResult, PushResult
from trireme.ps.rule import Rule
from trireme.ps.snapshot import ModelState, lacking

__all__ = ["GangClient", "Held"]


class Held(Protocol):
    """What a process holds of the model: a `FlatModel`, or a `ModelPart`."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """By their names in the model."""

    def gradient_norm(self) -> torch.Tensor:
        """Returns the L2 norm of the whole model's gradient."""

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiplies all gradients in place."""


class _Wish(enum.IntEnum):
    """What a process wants to do that all must do together."""

    STEP = 0
    VALUES = 1
    STATE = 2
    OPEN = 3
    MEAN = 4
    END = 5

    @property
    def words(self) -> str:
        """As part of a sentence."""
        return _WORDS[self]


_WORDS = {
    _Wish.STEP: "makes a step",
    _Wish.VALUES: "evaluates",
    _Wish.STATE: "saves",
    _Wish.OPEN: "begins to read a data set",
    _Wish.MEAN: "records",
    _Wish.END: "ends its training",
}


class _Header(msgspec.Struct, frozen=True):
    """What goes with the tensors of a state."""

    step: int
    consumed: tuple[Span, ...]
    sizes: dict[str, int] = {}


class GangClient:
    """One process of a gang that trains without servers.

    Args:
        gang: the processes.
        held: this one's part of the model.
        optimizer: the user's, over the parameters of that part.
        clip_norm: the L2 norm that the mean gradient is scaled down to; None for no clipping.
        agree_on_skips: whether a batch may count for nothing, so that all must ask each other.
        waiting: told the reason, the names and the seconds when others are waited for.
    """

    def __init__(
        self,
        gang: Gang,
        held: Held,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        agree_on_skips: bool = False,
        waiting: Callable[[str, Sequence[str], float], None] | None = None,
    ) -> None:
        check_optimizer(optimizer)
        self.step = 0
        self.stopping = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.wants_save = False  # set before a step: this process would save after it
        self.saves = False  # whether one of them would: then all take part
        self._gang = gang
        self._held = held
        self._names = frozenset(n for n, p in held.parameters.items() if p.requires_grad)
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._agree_on_skips = agree_on_skips
        self._watch = Watch(gang.rank, gang.size, gang.put, gang.get, waiting or _not_said)
        self._rule = Rule(0, 0)
        self._end: int | None = None
        self._wants_stop = False
        self._votes: Callable[[], list[float]] | None = None
        self._skip = False
        self._ledgers: dict[str, Ledger] = {}
        self._first: ModelState | None = None
        self._last: ModelState | None = None
        self._average: dict[str, torch.Tensor] = {}

    # -- joining --------------------------------------------------------------------------------

    def attach(self, optimizer: OptimizerSpec, rule: Rule) -> bool:
        """Takes the rule; returns False: the chief loads the first values."""
        self._rule = rule
        self._end = rule.max_steps
        return False

    def load(self, state: ModelState) -> None:
        """In the chief: has the first values, or a checkpoint's, for all; `pull` hands them out."""
        self._first = state

    def pull(self, *, train: bool = True) -> PullResult:
        """Takes the state that the chief has loaded. All processes must ask."""
        state = self._hand_out(self._first)
        self._first = None
        self._take(state)
        self.stopping = self._end is not None and self.step >= self._end
        self._watch.start()
        return PullResult(self.step, self.stopping)

    def _hand_out(self, state: ModelState | None) -> ModelState:
        """Gives every process the chief's state."""
        header = data = None
        if state is not None and self._gang.is_chief:
            header = msgspec.msgpack.encode(_Header(state.step, state.consumed, state.sizes))
            data = save_bytes(_packed(state))
        head = msgspec.msgpack.decode(self._gang.broadcast(header), type=_Header)
        tensors = load_bytes(self._gang.broadcast(data))
        return _unpacked(head, tensors)

    @torch.no_grad()
    def _take(self, state: ModelState) -> None:
        self.step = state.step
        for name, parameter in self._held.parameters.items():
            if name in state.values:
                take(parameter, state.values[name])
        if self._rule.average is not None:
            known = state.average or state.values
            self._average = {}
            for name, parameter in self._trained():
                average = torch.zeros_like(parameter.detach())
                take(average, known[name])
                self._average[name] = average
        if state.optimizer:
            self._restore(state.optimizer)
        self._consumed, self._sizes = state.consumed, state.sizes
        self._ledgers.clear()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """Returns what the job trains; a program may have frozen some of it since."""
        return [(n, p) for n, p in self._held.parameters.items() if n in self._names]

    # -- what all must do together --------------------------------------------------------------

    def _agree(self, wish: _Wish) -> None:
        """Waits until the chief wants the same; until then, takes part in what it wants.

        So the chief may evaluate or save without the others' programs knowing. Where every process
        has all of the model, it needs nobody for that, and nobody is asked.

        Raises:
            ConfigurationError: the chief does something else.
        """
        if not self._gang.mesh.sharded:
            return
        word = torch.tensor([int(wish)])
        while True:
            self._gang.broadcast_tensor(word)
            chief = _Wish(int(word))
            if chief == wish:
                return
            if chief not in (_Wish.VALUES, _Wish.STATE):
                raise ConfigurationError(
                    f"rank {self._gang.rank} {wish.words} at step {self.step}, and the chief "
                    f"{chief.words}: every process must run the same program; what only one of "
                    "them does must be the chief's"
                )
            self._gather(state=chief == _Wish.STATE)

    def begin_step(self) -> None:
        """Waits for the others to begin their step too."""
        self._watch.begins(self.step)
        self._gang.wishes = [float(self._wants_stop), float(self.wants_save)]
        self._agree(_Wish.STEP)

    # -- training -------------------------------------------------------------------------------

    @torch.no_grad()
    def push(
        self,
        weight: float,
        *,
        hyper: tuple[GroupSpec, ...] | None = None,
        examples: Sequence[Span] = (),
        pull: bool = True,
    ) -> None:
        """Applies the mean gradient, which is in the parameters already.

        Args:
            weight: how many examples this process's gradient was of; 0 leaves the step out.
            hyper: the optimizer's own already.
            examples: which they were.
            pull: the values are here in any case.

        Raises:
            ConfigurationError: training has ended.
        """
        if self.stopping:
            raise after_the_end(self._gang.rank, self.step)
        skip = weight == 0
        if self._agree_on_skips:
            skip = self._gang.total([float(skip)])()[0] > 0
        self._votes = self._gang.vote()
        if not skip:
            if self._clip_norm is not None:
                norm = self._held.gradient_norm()
                self._held.scale_gradients(
                    float(torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0))
                )
            self._optimizer.step()
            self._move_average()
        for span in examples:
            ledger = self._ledgers.get(span.dataset)
            if ledger is not None:
                ledger.finish(self._gang.replica, span.start, span.stop)

    def _move_average(self) -> None:
        rule = self._rule.average
        if rule is None:
            return
        weight = 1 - rule.decay_at(self.step + 1)
        for name, parameter in self._trained():
            local(self._average[name]).lerp_(local(parameter.detach()), weight)

    def wait(self) -> PushResult:
        """Returns what became of the push: it was applied. All agree whether it was the last."""
        assert self._votes is not None, "wait without push"
        stop, save = self._votes()
        self._votes = None
        self.step += 1
        self._watch.made(self.step)
        self.saves = save > 0
        self.stopping = stop > 0 or (self._end is not None and self.step >= self._end)
        return PushResult(Applied(self.step), self.step, 0, self.stopping)

    def lease(
        self, dataset: str, size: int, batch: int, count: int, *, resized: bool = False
    ) -> tuple[Span, ...]:
        """Returns the next examples of this replica: `count` spans of `batch`.

        Raises:
            Rejected: the processes disagree about the size of the data set or the batch.
        """
        ledger = self._ledgers.get(dataset)
        if ledger is None:
            request = Lease(self._gang.rank, 1, 1, dataset, size, batch, count, resized=resized)
            ledger = self._open(request)
        mine: list[Span] = []
        # What came back from before a resume goes to whoever asks first: all ask in one order.
        for replica in range(self._gang.mesh.replicas):
            spans = ledger.lease(replica, batch, count)
            if replica == self._gang.replica:
                mine = [Span(dataset, start, stop) for start, stop in spans]
        return tuple(mine)

    def _open(self, request: Lease) -> Ledger:
        dataset, size, batch = request.dataset, request.size, request.batch
        self._agree(_Wish.OPEN)
        said = msgspec.msgpack.encode((dataset, size, batch))
        for rank, other in enumerate(self._gang.exchange(said)):
            if other != said:
                theirs = msgspec.msgpack.decode(other, type=tuple[str, int, int])
                raise Rejected(
                    f"rank {rank} has the data set {theirs[0]!r} of {theirs[1]} examples in "
                    f"batches of {theirs[2]}, rank {self._gang.rank} {dataset!r} of {size} in "
                    f"batches of {batch}: every process must load the same data"
                )
        done = [(s.start, s.stop) for s in self._consumed if s.dataset == dataset]
        try:
            done = resized(dataset, done, self._sizes.get(dataset), request)
        except ValueError as error:
            raise Rejected(str(error)) from None
        ledger = Ledger(size, interleave=True)
        ledger.members(range(self._gang.mesh.replicas))
        ledger.restore(done)
        self._ledgers[dataset] = ledger
        return ledger

    def stop(self, reason: str) -> int:
        """Asks that the job end; it does after the step that all know of it. Returns that step."""
        self._wants_stop = True
        return self.step + 1

    def set_end(self, max_steps: int) -> int:
        """Sets the job's last step if it has none; returns the one that holds."""
        if self._end is None:
            self._end = max_steps
        return self._end

    def retire(self) -> None:
        """Waits for the others, who have made their last step too."""
        self._agree(_Wish.END)
        self._gang.barrier()

    def complete(self) -> None:
        """Nothing: every step is one of all."""

    def drain(self) -> int:
        """Has the last state at hand: one process alone may ask for it now. Returns the step."""
        self._agree(_Wish.END)
        self._last = self._gather(state=True)
        return self.step

    def share(self, topic: str, data: bytes) -> None:
        """Leaves bytes for the other processes."""
        self._gang.put(f"{topic}/{self._gang.rank}", data)

    def collect(self, topic: str) -> dict[int, bytes]:
        """Returns what each process has left under a topic."""
        found = {rank: self._gang.get(f"{topic}/{rank}") for rank in range(self._gang.size)}
        return {rank: data for rank, data in found.items() if data is not None}

    def mean(self, values: Mapping[str, float], *, counts: bool) -> dict[str, float]:
        """Returns the means over the processes whose values count. All processes must ask.

        Args:
            values: numbers by name, the same names everywhere they count.
            counts: whether this process's do.
        """
        self._agree(_Wish.MEAN)
        said = msgspec.msgpack.encode(dict(values) if counts else {})
        everyone = [
            msgspec.msgpack.decode(data, type=dict[str, float])
            for data in self._gang.exchange(said)
        ]
        named: dict[str, list[float]] = {}
        for one in everyone:
            for name, value in one.items():
                named.setdefault(name, []).append(value)
        return {name: sum(found) / len(found) for name, found in named.items()}

    # -- whole states ---------------------------------------------------------------------------

    def snapshot(self, *, state: bool) -> ModelState:
        """Returns the whole values, and with `state` all that goes with them.

        Until training has ended, all processes must ask together, or the chief alone while the
        others go on to their next step.
        """
        if self._last is not None:
            return self._last
        self._agree(_Wish.STATE if state else _Wish.VALUES)
        return self._gather(state=state)

    def _gather(self, *, state: bool) -> ModelState:
        tensors: dict[str, torch.Tensor] = {
            f"values/{name}": parameter.detach() for name, parameter in self._trained()
        }
        tensors |= {f"average/{name}": tensor for name, tensor in self._average.items()}
        lacks: tuple[str, ...] = ()
        if state:
            try:
                tensors |= {f"state/{name}": tensor for name, tensor in self._export().items()}
            except Exception as error:  # the values must not be lost with it
                lacks = (lacking("the optimizer's state", error),)
        # Shards are joined by all processes in turn: they must come in the same order everywhere,
        # and what was read from a file comes in any.
        mine = {name: whole(tensors[name]).clone() for name in sorted(tensors)}
        sizes = self._sizes | {name: ledger.size for name, ledger in self._ledgers.items()}
        header = _Header(self.step, self._all_consumed() if state else (), sizes)
        return replace(_unpacked(header, join(self._gang, mine)), lacks=lacks)

    def _all_consumed(self) -> tuple[Span, ...]:
        """Returns what all replicas have finished."""
        mine = {name: list(ledger.consumed) for name, ledger in self._ledgers.items()}
        for span in self._consumed:
            if span.dataset not in self._ledgers:
                mine.setdefault(span.dataset, []).append((span.start, span.stop))
        joined: dict[str, IntervalSet] = {}
        for data in self._gang.exchange(msgspec.msgpack.encode(mine)):
            said = msgspec.msgpack.decode(data, type=dict[str, list[tuple[int, int]]])
            for name, ranges in said.items():
                for start, stop in ranges:
                    joined.setdefault(name, IntervalSet()).add(start, stop)
        return tuple(
            Span(name, start, stop)
            for name, ranges in joined.items()
            for start, stop in ranges.ranges()
        )

    def _export(self) -> dict[str, torch.Tensor]:
        """Returns the optimizer's state as `PARAMETER/STATE` -> this process's tensor."""
        names = state_names(self._optimizer, self._held.parameters)
        state: dict[int, dict[str, Any]] = self._optimizer.state_dict()["state"]
        return {
            f"{names[index]}/{key}": torch.as_tensor(value).detach()
            for index, entries in state.items()
            if names[index] is not None
            for key, value in entries.items()
            if isinstance(value, (torch.Tensor, int, float))
        }

    def _restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replaces the optimizer's state by this process's part of a whole one.

        Raises:
            Rejected: it is another optimizer's.
        """
        names = state_names(self._optimizer, self._held.parameters)
        index = {name: position for position, name in enumerate(names) if name}
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, entry = key.rpartition("/")
            if name not in index:
                continue
            parameter = self._held.parameters[name]
            if tensor.shape == parameter.shape and tensor.dim():
                mine = torch.zeros_like(parameter.detach(), dtype=tensor.dtype)
                take(mine, tensor)
            else:
                mine = tensor.clone()
            state.setdefault(index[name], {})[entry] = mine
        check_complete(self._optimizer, state)
        self._optimizer.load_state_dict(
            {"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]}
        )

    def close(self) -> None:
        """Ends the watch; the gang is closed by whoever made it."""
        self._watch.close()


def _not_said(reason: str, names: Sequence[str], seconds: float) -> None:
    """Nobody wants to know for whom this process waits."""


_KINDS = ("values", "average", "state")


def _packed(state: ModelState) -> dict[str, torch.Tensor]:
    kinds = zip(_KINDS, (state.values, state.average, state.optimizer), strict=True)
    # A tied or an expanded tensor is written out: the format knows no views.
    return {
        f"{kind}/{name}": tensor.contiguous().clone()
        for kind, named in kinds
        for name, tensor in named.items()
    }


def _unpacked(header: _Header, tensors: Mapping[str, torch.Tensor]) -> ModelState:
    named: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in _KINDS}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        named[kind][name] = tensor
    state = ModelState(header.step, named["values"], named["average"], named["state"])
    return replace(state, consumed=header.consumed, sizes=header.sizes)
