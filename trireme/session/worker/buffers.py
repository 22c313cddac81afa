"""Buffers and frozen parameters: the tensors of a model that are not trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from trireme.session.backends.base import Backend
from trireme.session.model.module_names import named_buffers, state_of
from trireme.session.model.process_group import ProcessGroup
from trireme.session.model.training_setup import TrainingSetup
from trireme.tensors import mean_of

_INITIAL = "initial"
_WHEN = "/when"  # a key that no tensor has: the numbers of the view and of the step
_BUFFERS = "buffers"


class Buffers:
    """The buffers and the frozen parameters of a model that several workers train.

    Workers begin with those of the chief. Then the floating-point buffers of the workers
    differ, and their mean is evaluated and saved. Other buffers, such as counters, are those of the
    chief; where processes hold parts of a model, those of the first process that has the part.
    """

    def __init__(self, setup: TrainingSetup, backend: Backend) -> None:
        self._task = setup.settings.task
        self._setup = setup
        self._backend = backend
        # Whether this process is the whole job.
        self._alone = not self._task.coordinator and setup.process_group is None
        self._last: dict[str, torch.Tensor] | None = None  # their mean, when training has ended

    def constants(self) -> dict[str, torch.Tensor]:
        # By identity: a tied parameter has several names, and is trained under one of them.
        trained = {id(parameter) for parameter in self._setup.flat.parameters.values()}
        return {
            name: tensor.detach().cpu().contiguous().clone()
            for name, tensor in state_of(self._setup.model).items()
            if id(tensor) not in trained and not tensor.is_meta  # another process holds it
        }

    def set_constants(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replaces the named buffers and frozen parameters; ignores names of trained parameters."""
        own = state_of(self._setup.model)
        with torch.no_grad():
            for name in tensors:
                known = name in own and name not in self._setup.flat.parameters
                if known and not own[name].is_meta:
                    own[name].copy_(tensors[name])

    def hand_out(self, view: int) -> None:
        """Shares the chief's constants as they are now, for workers that begin."""
        when = torch.tensor([view, self._backend.global_step])
        self._backend.share(_INITIAL, save_bytes(self.constants() | {_WHEN: when}))

    def take(self) -> None:
        left = map(load_bytes, self._backend.collect(_INITIAL).values())
        self.set_constants(max(left, key=lambda each: each[_WHEN].tolist(), default={}))

    def spread(self) -> None:
        """Broadcasts the leader's constants to the processes of a worker of several processes."""
        if (group := self._worker_group) is not None:
            data = group.broadcast(save_bytes(self.constants()) if group.is_chief else None)
            self.set_constants(load_bytes(data))

    def publish(self) -> None:
        if self._alone or not self._changing():
            return
        own = self._own()
        if (group := self._worker_group) is not None:
            own = group.united(own)
        self._backend.share(_BUFFERS, save_bytes(own))

    def average(self) -> dict[str, torch.Tensor]:
        """Returns the mean over the workers of each buffer, as they were last shared."""
        if self._last is not None:
            return self._last
        everything = self._changing()
        if self._alone or not everything:
            return everything
        shared = {w: load_bytes(data) for w, data in self._backend.collect(_BUFFERS).items()}
        left = shared.get(self._task.index, {})
        # Of one replica this process's are newer; of several, what was left is the mean over them.
        group = self._worker_group
        several = group is not None and group.mesh.replicas > 1
        shared[self._task.index] = self._own() | left if several else left | self._own()
        averages: dict[str, torch.Tensor] = {}
        for name, tensor in everything.items():
            found = [s[name] for _, s in sorted(shared.items()) if name in s] or [tensor]
            averages[name] = mean_of(found)
        return averages

    def settle(self) -> None:
        if self._alone:
            return
        self._last = self.average()
        if (group := self._worker_group) is not None and self._last:
            data = save_bytes(self._last) if group.is_chief else None
            self._last = load_bytes(group.broadcast(data))
        self._put_buffers(self._last)

    @contextmanager
    def consistent_values(self) -> Iterator[int]:
        """Puts the values of one step, or their moving average, into the model during the block.

        The mean of the workers' buffers goes into the model too. Yields that step: servers may have
        gone on since this worker's last exchange.
        """
        setup = self._setup
        alone = self._task.servers == 0 and setup.part is None
        if alone:  # others may evaluate now too
            self.publish()
        means = {} if self._alone else self.average()
        own_buffers = {name: b.clone() for name, b in named_buffers(setup.model) if name in means}
        if alone and setup.settings.options.ema is None:
            step, values = self._backend.global_step, dict[str, torch.Tensor]()
        else:
            state = self._backend.snapshot(state=False)
            step, values = state.step, dict(state.average or state.values)
        own = {n: p.detach().clone() for n, p in setup.flat.parameters.items() if n in values}
        self._put(values, means)
        try:
            yield step
        finally:
            self._put(own, own_buffers)

    def collect_values(self, *, final: bool = False) -> None:
        """Copies the present values into the whole model, whose parts processes train.

        Unless they are final, this process's buffers stay.
        """
        part = self._setup.part
        mine = frozenset[str]() if part is None or final else part.buffer_names
        buffers = {name: value for name, value in self.average().items() if name not in mine}
        self._put(self._backend.snapshot(state=False).values, buffers)

    def _put(self, values: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad(), self._setup.own_writes.ours():
            for name, parameter in self._setup.flat.parameters.items() if values else ():
                parameter.copy_(values[name])
            self._put_buffers(buffers)

    @torch.no_grad()
    def _put_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in named_buffers(self._setup.model):
            if name in buffers:
                buffer.copy_(buffers[name])

    @property
    def _worker_group(self) -> ProcessGroup | None:
        """The processes of this worker, where servers see them as one; None elsewhere."""
        return self._setup.process_group if self._task.servers else None

    def _own(self) -> dict[str, torch.Tensor]:
        part, everything = self._setup.part, self._changing()
        if part is None:
            return everything
        return {name: b for name, b in everything.items() if name in part.buffer_names}

    def _changing(self) -> dict[str, torch.Tensor]:
        """Returns the buffers of which the chief's own are not those to evaluate and save."""
        return {
            name: buffer.detach().cpu().contiguous().clone()
            for name, buffer in named_buffers(self._setup.model)
            if buffer.is_floating_point() or self._setup.part is not None
        }
