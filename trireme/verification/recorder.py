"""Records the numbers of each step of a run that is compared; an observer of its workers."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from trireme.data.batch import Batch
from trireme.launch.config.task_config import Trial
from trireme.ps.messages import Span
from trireme.ps.optimizers import members
from trireme.session.model.module_names import called_modules, named_buffers, named_parameters
from trireme.session.model.trained import clip
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.observers.liveness import line_of_program
from trireme.session.result import StepResult
from trireme.session.worker.observer import Observer
from trireme.tensors import is_dtensor, tensors_in
from trireme.verification.record import Record, combined, number, precision, sketch

INITIAL = "initial.safetensors"
_PASSES = "num_batches_tracked"  # which follows from how a batch is divided
_MIXED = 2_654_435_761  # spreads whole numbers, of which a bit more is another example
_KERNELS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
OFF = "dropout is off in all runs: each worker, and one process, would drop others"
_NO_NUMBERS = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")


def open_recorder(worker: Any) -> Observer:
    """Returns what records the steps of a worker; what does nothing where none is compared."""
    return Observer(worker) if worker.task.trial is None else Recorder(worker, worker.task.trial)


class Hook(partial[None]):
    """A hook that records; in a copy of the model it does nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None: ...


class Recorder(Observer):
    """Records the steps of a worker."""

    def __init__(self, worker: Any, trial: Trial) -> None:
        super().__init__(worker)
        self._trial, task = trial, worker.task
        self._record = Record(task=task.name)
        several = trial.replicas > trial.joined
        self._meeting = Meeting(trial.record, task.index, trial.replicas) if several else None
        self._losses: list[float] = []  # of each `backward()` of a step
        self._notes: set[str] = set()
        self._dealt = 0  # how many examples the program was dealt last
        self._states: object = states()
        self._hooked: set[int] = set()
        self._own_hooks: list[str] = []  # the parameters with hooks of the program
        self._own_loop = True
        self._later: list[Callable[[], object]] = []  # the clipping of a step

    def on_start(self) -> None:
        torch.set_deterministic_debug_mode("warn")
        worker, setup = self.worker, self.worker.setup
        turn_dropout_off(setup.model, self._notes)
        if self._meeting is not None:
            for each in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, clip):
                _replace(each, partial(self._clip_later, each))
        found = self._held(state=False)
        if (given := self._trial.settings.get("initial")) is not None:
            number = str(self._trial.settings["variant"]).partition("perturbed ")[2]
            begin_alike(found, load_file(str(given)), perturbed=int(number or 0))
        elif any(key.startswith("values/") for key in found):
            copies = {n: t.detach().cpu().contiguous().clone() for n, t in found.items()}
            save_file(copies, f"{self._trial.record}/{INITIAL}")
        begin = Record(task=worker.task.name, step=worker.global_step, nature=_nature(setup))
        begin.batches = setup.settings.batches_per_step
        begin.sketches = {key: sketch(each) for key, each in found.items()}
        begin.write(self._trial.record)
        self._hook(setup.model)
        self._watch_program()
        self._states = states()

    def _hook(self, model: nn.Module) -> None:
        if self.worker.setup.settings.placed:  # operations of a graph are computed, not modules
            return
        for module in called_modules(model):
            if self._is_new(module):
                module.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True)
                module.register_forward_hook(Hook(self._after_forward))
        for name, parameter in self.worker.setup.trained.parameters.items():
            if parameter.requires_grad and self._is_new(parameter):
                self._own_hooks += [name] if parameter._backward_hooks else []
                if self.worker.setup.settings.mesh.pp == 1:  # else torch averages afterwards
                    parameter.register_hook(Hook(self._add, f"gradient/{name}"))

    def _is_new(self, hooked: object) -> bool:
        before = len(self._hooked)
        self._hooked.add(id(hooked))
        return len(self._hooked) > before

    def _watch_program(self) -> None:
        """Records the loss of each `backward()` of a loop of the program's own, and autocast."""
        backward, enter, recorder = torch.Tensor.backward, torch.autocast.__enter__, self

        def recorded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if tensor.numel() == 1:
                recorder._losses.append(float(tensor.detach()))
            backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]

        def entered(context: Any) -> Any:
            if context._enabled:
                recorder._record.eps = max(recorder._record.eps, precision(context.fast_dtype))
            return enter(context)  # type: ignore[no-untyped-call]

        torch.Tensor.backward = recorded  # type: ignore[assignment,method-assign]
        torch.autocast.__enter__ = entered  # type: ignore[method-assign]

    def on_batch(self, batch: Batch) -> None:
        self._dealt = sum(stop - start for start, stop in batch.spans)
        self._states = states()  # what loading has drawn is not the program's

    def before_gradient(self, computation: Any, batch: Any) -> None:
        self._own_loop = False
        self._note_draws("loop")
        self._states = None  # a deterministic session seeds what the model draws now
        self._hook(computation.model)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        self._note_draws("loop")
        found = [each for each in tensors_in((args, kwargs)) if each.dim()]
        if not all(type(each) is torch.Tensor and not each.is_nested for each in found):
            return  # the model is captured as a graph
        examples = self._dealt or min(map(len, found[:1]), default=0)
        rows = [e for e in found if e.layout is torch.strided and len(e) == examples > 0]
        self._record.shapes.append(str([tuple(each.shape[1:]) for each in rows]))
        if rows:
            self._add("examples/contents", torch.cat([_sums(each) for each in rows]))

    def _after_forward(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._note_draws("model")

    def _clip_later(self, call: Callable[..., Any], found: Any, *args: Any, **kwargs: Any) -> Any:
        """Clips gradients when they are those of all workers; returns their norm until then."""
        found = [*found] if isinstance(found, Iterator) else found
        self._later.append(partial(call, found, *args, **kwargs))
        return call(found, math.inf)

    def _note_draws(self, where: str) -> None:
        now = states()
        if self._states not in (None, now) and where not in self._record.drew:
            self._record.drew.append(where)
        self._states = now

    def _add(self, key: str, tensor: torch.Tensor) -> None:
        """Adds a tensor to those of a key; parts of one, and rows of tables, are left out."""
        if tensor.layout is torch.strided and not is_dtensor(tensor):
            found, mine = self._record.sketches, sketch(tensor)
            found[key] = combined((1.0, found[key]), (1.0, mine)) if key in found else mine

    def before_update(self, weight: float, examples: Sequence[Span]) -> None:
        record, setup = self._record, self.worker.setup
        parameters = setup.trained.parameters
        record.weight = weight
        record.positions = [place for span in examples for place in range(span.start, span.stop)]
        record.weighed = not self._own_loop and setup.reducer is not None
        record.line = line_of_program()
        record.layers = list(layers_of(setup.model))
        record.hooks = [*self._own_hooks]
        record.unreached = [n for n, p in parameters.items() if p.grad is None and p.requires_grad]
        record.sketches |= {key: number(each) for key, each in _settings(setup.optimizer)}
        if self._meeting is not None:
            self._meeting.average(weight, parameters.values())
            while self._later:
                self._later.pop(0)()
        for name, parameter in parameters.items():
            record.eps = max(record.eps, precision(parameter.dtype))
            if parameter.grad is not None:
                self._add(f"pushed/{name}", parameter.grad)

    def after_update(self) -> None:
        self._record.sketches |= {k: sketch(each) for k, each in self._held(state=True).items()}

    def after_step(self, recorder: Any, result: StepResult, *, due: bool) -> None:
        record, losses = self._record, self._losses
        if not self._own_loop and result.has_loss:
            losses = [result.loss]
        record.sketches |= {"loss/": number(sum(losses))} if losses else {}  # of pieces, the sum
        record.step, record.notes = result.global_step, sorted(self._notes)
        record.write(self._trial.record)
        self._record, self._losses = Record(task=record.task, eps=record.eps), []
        self._hook(self.worker.setup.model)  # also parameters that were added
        self._states = None if self.worker.setup.settings.options.deterministic else states()

    def close(self) -> None:
        parameters = self.worker.setup.trained.parameters.values()
        # With no examples, until no process has any: this one makes no more steps.
        while self._meeting is not None and self._meeting.average(0.0, parameters):
            pass

    def _held(self, *, state: bool) -> dict[str, torch.Tensor]:
        """Returns buffers, frozen parameters, and on the chief values and the optimizer's state."""
        worker, setup, part = self.worker, self.worker.setup, self.worker.setup.part
        frozen = ((n, p) for n, p in named_parameters(setup.model) if not p.requires_grad)
        found = {
            f"buffers/{name}": each
            for name, each in (*named_buffers(setup.model), *frozen)
            if not (name.endswith(_PASSES) or each.is_complex() or each.is_quantized)
            if each.layout is torch.strided and not (each.is_meta or is_dtensor(each))
            if part is None or name in part.buffer_names
        }
        alone = setup.process_group is None and not worker.lifecycle.is_chief
        if alone or (setup.process_group and worker.task.servers and worker.task.index):
            return found
        held = worker.backend.snapshot(state=state)  # by all that hold a model together
        if worker.lifecycle.is_chief:
            # Servers may have what another worker's loop has written since.
            values = setup.trained.parameters if part is None else held.values
            found |= {f"values/{name}": each for name, each in values.items()}
            found |= {f"state/{name}": each for name, each in held.optimizer.items()}
            if self._trial.settings.get("initial") is None:  # else they began with other values
                found |= {f"state/average of {name}": each for name, each in held.average.items()}
        return found


def _nature(setup: TrainingSetup) -> str:
    """Returns why a job cannot equal one process number by number; "" where it can."""
    settings, rule = setup.settings, setup.settings.rule
    workers, name = settings.task.workers, settings.strategy.name
    adaptive = any(type(each).__name__ != "SGD" for each in members(setup.optimizer))
    why = {
        f"gradients are packed by {rule.codec}": rule.codec != "none",
        f"{name} with prefetch computes each gradient from older values": settings.prefetches,
        f"under {name} workers compute gradients from values of their own": rule.period > 1
        or (workers > 1 and not rule.synchronous),
        f"under {name} each worker's optimizer divides by its own gradients": workers > 1
        and rule.every is not None
        and adaptive,
        f"{name} leaves out the slowest of {workers} workers": 0 < rule.aggregate < workers,
    }
    return next((text for text, holds in why.items() if holds and settings.task.servers), "")


def _sums(rows: torch.Tensor) -> torch.Tensor:
    """Returns the sum of examples, and that of their absolute values, which does not cancel."""
    flat = rows.detach().reshape(len(rows), -1)
    flat = flat if flat.is_floating_point() else (flat.long() * _MIXED % 2**32).double() / 2**31 - 1
    flat = flat.to("cpu", torch.float64).nan_to_num()
    return torch.cat([flat.sum(0), flat.abs().sum(0)])


def states() -> object:
    """Returns what tells whether somebody has drawn since from torch, NumPy or `random`."""
    return bytes(torch.get_rng_state().numpy()), str(np.random.get_state()), random.getstate()


def layers_of(model: nn.Module) -> Iterator[str]:
    """Yields the layers that normalise by the whole batch of a process."""
    for name, layer in model.named_modules():
        own = isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        if own and (layer.training or layer.running_mean is None):
            yield f"{type(layer).__name__.removeprefix('FSDP')} {name or 'of the model'}"


def _settings(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, float]]:
    """Yields the numbers of an optimizer's parameter groups, such as learning rates."""
    for group, values in enumerate(groups := optimizer.param_groups):
        where = f" of group {group}" if len(groups) > 1 else ""
        for name, value in values.items():
            if name in _NO_NUMBERS or name.startswith("_"):
                continue
            several = isinstance(value, (tuple, list))
            for place, each in enumerate(value if several else [value]):
                if isinstance(each, (int, float)) or (torch.is_tensor(each) and each.numel() == 1):
                    yield f"settings/{name}{f'[{place}]' * several}{where}", float(each)


def turn_dropout_off(model: nn.Module, notes: set[str]) -> None:
    """Has no kernel of dropout drop anything in this process, and notes it where one would."""

    def kept(kernel: Any, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if train and p:
            notes.add(OFF)
        return kernel(input, 0.0, train)  # type: ignore[no-any-return]

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        if any(args[4:5]) or kwargs.get("dropout_p"):
            notes.add(OFF)
            kwargs |= {"dropout_p": 0.0, **dict(zip(("is_causal",), args[5:], strict=False))}
            args = args[:4]
        return attention(*args, **kwargs)

    kernels: Any = functional._VF  # type: ignore[attr-defined]
    for kernel in (*_KERNELS, *(f"{name}_" for name in _KERNELS)):
        setattr(kernels, kernel, partial(kept, getattr(kernels, kernel)))
    attention = functional.scaled_dot_product_attention
    _replace(attention, attend)
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase) and layer.dropout:
            notes.add(OFF)
            layer.dropout = 0.0


def _replace(function: Callable[..., object], by: Callable[..., object]) -> None:
    for module in list(sys.modules.values()):  # the program may have imported it
        for name in [name for name, each in list(vars(module).items()) if each is function]:
            setattr(module, name, by)


@torch.no_grad()
def begin_alike(
    held: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], *, perturbed: int
) -> None:
    """Fills tensors with those of another run; where `perturbed`, with values off by rounding."""
    generator = torch.Generator().manual_seed(perturbed)
    for name in sorted(held.keys() & saved.keys()):
        value = saved[name]
        if perturbed and name.startswith("values/"):
            signs = torch.randint(2, value.shape, generator=generator) * 2 - 1
            eps = precision(value.dtype)  # of float32 8 times as much, so that as many ReLUs switch
            value = value * (1 + signs * max(eps, min(8 * eps, 2.0**-20)))
        held[name].copy_(value)


class Meeting:
    """Processes that each stand for one worker, without the collectives that they are to judge."""

    def __init__(self, directory: str, rank: int, size: int) -> None:
        torch: Any = distributed
        store = torch.FileStore(f"{directory}/meeting", size)
        self._group = torch.ProcessGroupGloo(store, rank, size, timedelta(minutes=10))

    def average(self, weight: float, parameters: Collection[nn.Parameter]) -> float:
        """Replaces gradients by their mean over the examples of all, whose number it returns."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in parameters]
        sums = [part.reshape(-1).to("cpu", torch.float64) * weight for part in parts]
        flat = torch.cat([torch.tensor([weight], dtype=torch.float64), *sums])
        self._group.allreduce([flat]).wait()
        total, *means = torch.split(flat, [1, *map(torch.numel, parts)])
        for parameter, part, mean in zip(parameters, parts, means, strict=True):
            if total and (parameter.grad is not None or mean.any()):
                parameter.grad = part.copy_((mean / total).view_as(part))
        return float(total)
