"""Training without parameter servers, by the processes of a process group.

Every process applies the same mean gradient to its part of the parameters, with the user's
optimizer. All processes make the same steps: each computes the next examples from its own copy of
the same ledger.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import nn

from trireme.errors import ConfigurationError, Rejected
from trireme.parallel.model_part import join_stages
from trireme.parallel.process_group import ProcessGroup
from trireme.parallel.sharding import fill_local, full_tensor, local_part
from trireme.parallel.straggler_watch import StragglerWatch
from trireme.parallel.tensors import to_local
from trireme.ps.messages import Applied, GroupSpec, Lease, OptimizerSpec, Span
from trireme.ps.optimizers import check_optimizer, named_state, restore_state
from trireme.ps.results import PushResult
from trireme.ps.rule import Rule
from trireme.ps.shard.example_ledgers import ExampleLedgers
from trireme.ps.snapshot import ModelState, lacking
from trireme.ps.termination import after_the_end
from trireme.session.backends.base import Backend, FirstState, joined_spans
from trireme.session.replica.replica import clip
from trireme.session.training_setup import TrainingSetup

__all__ = ["Collective"]


class _Action(enum.Enum):
    """An action that all processes must take together, as the verb of a sentence."""

    STEP = "makes a step"
    VALUES = "evaluates"
    STATE = "saves"
    OPEN = "begins to read a data set"
    MEAN = "records"
    END = "ends its training"


_ACTIONS = tuple(_Action)


class _Header(msgspec.Struct, frozen=True):
    """The part of a state that is not tensors."""

    step: int
    consumed: tuple[Span, ...]
    sizes: dict[str, int] = {}


class Collective(Backend):
    """One process of a group that trains without servers.

    Args:
        group: the processes.
        setup: what is trained, and by which optimizer.
        waiting: called with the reason, the names and the seconds while others are waited for.
    """

    group: ProcessGroup
    step: int = 0
    stopping: bool = False
    together = True

    def __init__(
        self,
        group: ProcessGroup,
        setup: TrainingSetup,
        waiting: Callable[[str, Sequence[str], float], None],
    ) -> None:
        check_optimizer(setup.optimizer)
        held, options = setup.trained, setup.settings.options
        self.saves = False
        self.group = group
        self._held = held
        self._names = frozenset(n for n, p in held.parameters.items() if p.requires_grad)
        self._optimizer = setup.optimizer
        self._clip_norm = options.clip_norm
        self._agree_on_skips = options.nan == "skip"  # a batch of one process may be left out
        self._watch = StragglerWatch(group.rank, group.size, group.put, group.get, waiting)
        self._rule = setup.settings.rule
        self._end = self._rule.max_steps
        self._wants_stop = False
        self._vote_totals: Callable[[], list[float]] | None = None
        self._ledgers = ExampleLedgers()  # each process has the same ones
        self._ledgers.interleave = True
        self._ledgers.members(range(group.mesh.replicas))
        self._opened: set[str] = set()  # the data sets that all processes have agreed on
        self._last: ModelState | None = None
        self._average: dict[str, torch.Tensor] = {}

    # -- joining --------------------------------------------------------------------------------

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        self._take(self._hand_out(first()))
        self.stopping = self._end is not None and self.step >= self._end
        self._watch.start()

    def _hand_out(self, state: ModelState | None) -> ModelState:
        """Broadcasts the chief's state to every process."""
        header = data = None
        if state is not None:
            header = msgspec.msgpack.encode(_Header(state.step, state.consumed, state.sizes))
            data = save_bytes(_packed(state))
        head = msgspec.msgpack.decode(self.group.broadcast(header), type=_Header)
        tensors = load_bytes(self.group.broadcast(data))
        return _unpacked(head, tensors)

    @torch.no_grad()
    def _take(self, state: ModelState) -> None:
        self.step = state.step
        for name, parameter in self._held.parameters.items():
            if name in state.values:
                fill_local(parameter, state.values[name])
        if self._rule.average is not None:
            known = state.average or state.values
            self._average = {}
            for name, parameter in self._trained():
                average = torch.zeros_like(parameter.detach())
                fill_local(average, known[name])
                self._average[name] = average
        if state.optimizer:
            restore_state(self._optimizer, self._held.parameters, state.optimizer, local_part)
        self._ledgers.restore(state.consumed, state.sizes)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters that the job trains, also those that the program froze later."""
        return [(n, p) for n, p in self._held.parameters.items() if n in self._names]

    # -- collective actions ---------------------------------------------------------------------

    def _agree(self, action: _Action) -> None:
        """Takes part in the chief's actions until the chief takes the given action too.

        The chief can thus evaluate or save without a call in the programs of the others. Where
        every process holds the whole model, the chief needs no other process for these.

        Raises:
            ConfigurationError: the chief takes an action that it cannot take alone.
        """
        if not self.group.mesh.sharded:
            return
        word = torch.tensor([_ACTIONS.index(action)])
        while True:
            self.group.broadcast_tensor(word)
            chief = _ACTIONS[int(word)]
            if chief == action:
                return
            if chief not in (_Action.VALUES, _Action.STATE):
                raise ConfigurationError(
                    f"rank {self.group.rank} {action.value} at step {self.step}, and the "
                    f"chief {chief.value}: every process must run the same program; "
                    "an action of one process alone must be the chief's"
                )
            self._gather(state=chief == _Action.STATE)

    def begin_step(self) -> None:
        self._watch.step_began(self.step)
        self.group.votes = [float(self._wants_stop), float(self.wants_save)]
        self._agree(_Action.STEP)

    # -- training -------------------------------------------------------------------------------

    @torch.no_grad()
    def push(
        self,
        weight: float,
        *,
        hyper: tuple[GroupSpec, ...] | None = None,
        examples: Sequence[Span] = (),
        pulled: int | None = None,
    ) -> None:
        """Applies the mean gradient, which the parameters' gradients already are.

        Raises:
            ConfigurationError: training has ended.
        """
        if self.stopping:
            raise after_the_end(self.group.rank, self.step)
        skip = weight == 0
        if self._agree_on_skips:
            skip = self.group.total([float(skip)])()[0] > 0
        self._vote_totals = self.group.vote()
        if not skip:
            if self._clip_norm is not None:
                clip(self._held, self._clip_norm)
            self._optimizer.step()
            self._move_average()
        self._ledgers.finish(self.group.replica, examples)

    def _move_average(self) -> None:
        rule = self._rule.average
        if rule is None:
            return
        weight = 1 - rule.decay_at(self.step + 1)
        for name, parameter in self._trained():
            to_local(self._average[name]).lerp_(to_local(parameter.detach()), weight)

    def wait(self) -> PushResult:
        """Returns the verdict `Applied`; all processes agree on whether that was the last step."""
        assert self._vote_totals is not None, "there was no exchange to end"
        stop, save = self._vote_totals()
        self._vote_totals = None
        self.step += 1
        self._watch.step_ended(self.step)
        self.saves = save > 0
        self.stopping = stop > 0 or (self._end is not None and self.step >= self._end)
        return PushResult(Applied(self.step), self.step, 0, self.stopping)

    def lease(
        self, dataset: str, size: int, batch: int, count: int, *, resized: bool = False
    ) -> tuple[Span, ...]:
        if dataset not in self._opened:
            self._open(dataset, size, batch)
        request = Lease(0, dataset, size, batch, count, resized=resized)
        try:
            # Positions returned before a resume go to the first request: all request in one order.
            replicas = range(self.group.mesh.replicas)
            leased = [self._ledgers.lease(replica, request) for replica in replicas]
        except ValueError as error:
            raise Rejected(str(error)) from None
        return leased[self.group.replica]

    def _open(self, dataset: str, size: int, batch: int) -> None:
        """Checks that all processes have the same data set.

        Raises:
            Rejected: another process has another one.
        """
        self._agree(_Action.OPEN)
        said = msgspec.msgpack.encode((dataset, size, batch))
        for rank, other in enumerate(self.group.exchange(said)):
            if other != said:
                theirs = msgspec.msgpack.decode(other, type=tuple[str, int, int])
                raise Rejected(
                    f"rank {rank} has the data set {theirs[0]!r} of {theirs[1]} examples in "
                    f"batches of {theirs[2]}, rank {self.group.rank} {dataset!r} of {size} in "
                    f"batches of {batch}: every process must load the same data"
                )
        self._opened.add(dataset)

    def stop(self, reason: str) -> int:
        """Requests the end of the job after the next step; returns that step."""
        self._wants_stop = True
        return self.step + 1

    def set_end(self, max_steps: int) -> int:
        if self._end is None:
            self._end = max_steps
        return self._end

    def retire(self) -> None:
        """Waits until the other processes have made their last step too."""
        self._agree(_Action.END)
        self.group.barrier()

    def drain(self) -> int:
        """Keeps the final state, which a single process may then copy; returns its step."""
        self._agree(_Action.END)
        self._last = self._gather(state=True)
        return self.step

    def share(self, topic: str, data: bytes) -> None:
        self.group.put(f"{topic}/{self.group.rank}", data)

    def collect(self, topic: str) -> dict[int, bytes]:
        found = {rank: self.group.get(f"{topic}/{rank}") for rank in range(self.group.size)}
        return {rank: data for rank, data in found.items() if data is not None}

    def mean(self, values: Mapping[str, float], *, counts: bool) -> dict[str, float]:
        self._agree(_Action.MEAN)
        return super().mean(values, counts=counts)

    # -- states ---------------------------------------------------------------------------------

    def snapshot(self, *, state: bool) -> ModelState:
        if self._last is not None:
            return self._last
        self._agree(_Action.STATE if state else _Action.VALUES)
        return self._gather(state=state)

    def _gather(self, *, state: bool) -> ModelState:
        tensors: dict[str, torch.Tensor] = {
            f"values/{name}": parameter.detach() for name, parameter in self._trained()
        }
        tensors |= {f"average/{name}": tensor for name, tensor in self._average.items()}
        lacks: tuple[str, ...] = ()
        if state:
            try:
                mine = named_state(self._optimizer, self._held.parameters)
                tensors |= {f"state/{name}": tensor for name, tensor in mine.items()}
            except Exception as error:  # the values must not be lost with it
                lacks = (lacking("the optimizer's state", error),)
        # All processes join shards in the same order: sorted, as names read from a file may not be.
        mine = {name: full_tensor(tensors[name]).clone() for name in sorted(tensors)}
        consumed = self._all_consumed() if state else ()
        header = _Header(self.step, consumed, self._ledgers.sizes())
        return replace(_unpacked(header, join_stages(self.group, mine)), lacks=lacks)

    def _all_consumed(self) -> tuple[Span, ...]:
        """Returns the positions that all replicas have finished."""
        said = self.group.exchange(msgspec.msgpack.encode(self._ledgers.consumed()))
        return joined_spans(
            span for data in said for span in msgspec.msgpack.decode(data, type=list[Span])
        )

    def close(self) -> None:
        self._watch.close()  # the lifecycle closes the process group


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
