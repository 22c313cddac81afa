"""Records the numbers of each step of a run that is compared; an observer of its workers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trireme.data.batch import Batch
from trireme.launch.config.task_config import Trial
from trireme.ps.messages import Span
from trireme.ps.optimizers import members
from trireme.session.model.module_names import called_modules, named_buffers
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.observers.liveness import line_of_program
from trireme.session.result import StepResult
from trireme.session.worker.observer import Observer
from trireme.tensors import is_dtensor, tensors_in, to_local
from trireme.verification.draws import Dropout, states
from trireme.verification.meeting import leave, meet
from trireme.verification.record import Record, RecordFile
from trireme.verification.sketch import Sketch, plus, signs, sketch

INITIAL = "initial.safetensors"
_BATCH_LAYERS = ("BatchNorm", "InstanceNorm")
_NARROW = (torch.bfloat16, torch.float16)
_MOST_EXAMPLES = 4096  # of a call of the model whose digests are recorded
_OWN = 1 << 40  # the first position of batches that a program makes itself


def open_recorder(worker: Any) -> Observer:
    """Returns what records the steps of a worker; what does nothing where none is compared."""
    return Observer(worker) if worker.task.trial is None else Recorder(worker, worker.task.trial)


class Recorder(Observer):
    """Records the steps of a worker."""

    def __init__(self, worker: Any, trial: Trial) -> None:
        super().__init__(worker)
        self._trial = trial
        self._directory = Path(trial.record)
        self._file = RecordFile(self._directory, worker.task.name)
        self._record = Record(task=worker.task.name)
        self._dropout = Dropout(follows=trial.settings.get("dropout") != "off")
        self._positions: list[int] = []
        self._states = states()
        self._own_examples = 0
        self._hooked: set[int] = set()
        self._narrow: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._own_loop = True
        self._forward = False  # whether the model computes a loss that is recorded

    # -- the beginning ---------------------------------------------------------------------------

    def on_start(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        setup = self.worker.setup
        self._dropout.install(setup.model)
        self._begin_alike()
        self._hook(setup.model)
        self._watch_losses()
        self._states = states()
        self._first_record()

    def _first_record(self) -> None:
        settings, record = self.worker.setup.settings, Record(task=self.worker.task.name)
        record.step = self.worker.global_step
        record.batches, record.nature = settings.batches_per_step, _nature(self.worker.setup)
        found = self._values(state=False)
        if found is not None:
            record.values = {name: sketch(each) for name, each in found[0].items()}
        for name, buffer in named_buffers(self.worker.setup.model):
            if buffer.is_floating_point() and not buffer.is_meta:
                record.buffers[name] = sketch(buffer)
        self._file.append(record)

    def _begin_alike(self) -> None:
        """Saves the job's first values, or begins with those that another run has saved."""
        given = self._trial.settings.get("initial")
        if given is None:
            values = self._values(state=False)
            if values is not None and not (self._directory / INITIAL).exists():
                tensors = {f"values/{name}": each for name, each in values[0].items()}
                for name, buffer in named_buffers(self.worker.setup.model):
                    tensors[f"buffers/{name}"] = buffer
                copies = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
                save_file(copies, self._directory / INITIAL)
            return
        tensors = load_file(str(given))
        held = {f"values/{n}": p for n, p in self.worker.setup.trained.parameters.items()}
        held |= {f"buffers/{n}": b for n, b in named_buffers(self.worker.setup.model)}
        scale = float(self._trial.settings.get("perturb", 0))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name in sorted(held.keys() & tensors.keys()):
                value, target = tensors[name], held[name]
                if scale and value.is_floating_point() and name.startswith("values/"):
                    signs = torch.randint(2, value.shape, generator=generator) * 2 - 1
                    value = value * (1 + signs * scale * torch.finfo(value.dtype).eps)
                target.copy_(value)

    def _hook(self, model: nn.Module) -> None:
        if self.worker.setup.settings.placed:  # operations of a graph are computed, not modules
            return
        for module in called_modules(model):
            if id(module) not in self._hooked:
                self._hooked.add(id(module))
                self._count_hooks(module)
                module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
                module.register_forward_hook(self._after_forward)
        for name, layer in model.named_modules():
            if any(kind in type(layer).__name__ for kind in _BATCH_LAYERS):
                self._record.layers[name] = type(layer).__name__.removeprefix("FSDP")
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        if self.worker.setup.settings.placed:
            return
        for name, parameter in self.worker.setup.trained.parameters.items():
            if id(parameter) not in self._hooked and parameter.requires_grad:
                self._hooked.add(id(parameter))
                self._count(parameter._backward_hooks, f"hook of {name}")
                parameter.register_hook(partial(self._computed, name))

    def _count_hooks(self, model: nn.Module) -> None:
        """Counts the calls of the program's own hooks."""
        kinds = {
            "forward hook": "_forward_hooks",
            "forward pre-hook": "_forward_pre_hooks",
            "backward hook": "_backward_hooks",
        }
        for name, module in model.named_modules():
            for kind, attribute in kinds.items():
                self._count(getattr(module, attribute), f"{kind} of {name or 'the model'}")

    def _count(self, hooks: Any, what: str) -> None:
        for key, hook in list((hooks or {}).items()):
            if not (getattr(hook, "__module__", "") or "").startswith(("trireme.", "torch.")):
                hooks[key] = partial(self._called, what, hook)

    def _called(self, what: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._record.hooks[what] = self._record.hooks.get(what, 0) + 1
        return hook(*args, **kwargs)

    def _watch_losses(self) -> None:
        """Records the loss of each `backward()` of a loop of the program's own."""
        original, recorder = torch.Tensor.backward, self

        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if tensor.numel() == 1:
                recorder._record.losses.append(float(tensor.detach()))
            original(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]

        torch.Tensor.backward = backward  # type: ignore[assignment,method-assign]

    # -- a step ----------------------------------------------------------------------------------

    def on_batch(self, batch: Batch) -> None:
        self._positions = [place for start, stop in batch.spans for place in range(start, stop)]
        self._dropout.examples(self._positions)
        self._states = states()  # what loading has drawn is not the program's

    def before_gradient(self, computation: Any, batch: Any) -> None:
        self._own_loop = False
        if id(computation.model) not in self._hooked:
            self._hook(computation.model)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        found = [each for each in tensors_in((args, kwargs)) if each.dim()]
        if not all(type(each) is torch.Tensor for each in found):
            return  # the model is captured as a graph
        if states() != self._states:
            self._drew("loop")
        positions = self._positions
        if not positions and found:
            replica = self._trial.replica or self.worker.setup.replica
            first = _OWN * (1 + replica) + self._own_examples
            positions = list(range(first, first + len(found[0])))
        self._dropout.examples(positions)
        rows = [each for each in found if len(each) == len(positions) <= _MOST_EXAMPLES]
        floats = [each for each in rows if each.is_floating_point()]
        self._record.examples.append(_digests([e for e in rows if not e.is_floating_point()]))
        self._record.marks.append(_marks(floats) if floats else [])
        self._record.shapes.append(str([tuple(each.shape[1:]) for each in rows]))
        self._forward = True
        self._states = states()

    def _after_forward(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._forward:
            self._forward = False
            if states() != self._states:
                self._drew("model")
            self._states = states()

    def _drew(self, where: str) -> None:
        if where not in self._record.drew:
            self._record.drew.append(where)

    def _computed(self, name: str, gradient: torch.Tensor) -> None:
        if is_dtensor(gradient) or gradient.layout is not torch.strided:
            return
        mine = self._sketch("computed", name, gradient)
        before = self._record.computed.get(name)
        self._record.computed[name] = mine if before is None else plus(before, mine)

    def before_update(self, weight: float, examples: Sequence[Span]) -> None:
        record, parameters = self._record, self.worker.setup.trained.parameters
        record.weight = weight
        record.spans = tuple((span.start, span.stop) for span in examples)
        record.dealt = bool(self._positions)
        record.weighed = not self._own_loop and self.worker.setup.reducer is not None
        record.line = line_of_program()
        record.settings = [_numbers(group) for group in self.worker.setup.optimizer.param_groups]
        record.unreached = [n for n, p in parameters.items() if p.grad is None and p.requires_grad]
        if self._trial.replicas > 1 and self._trial.joined == 1:
            meet(self._directory, self._trial, self.worker.global_step, weight, parameters)
        self._narrow.clear()
        for name, parameter in parameters.items():
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided or is_dtensor(gradient):
                continue
            record.pushed[name] = self._sketch("pushed", name, gradient)
            if parameter.dtype in _NARROW:
                self._narrow[name] = parameter.detach().clone(), gradient.detach() != 0

    def after_update(self) -> None:
        record, setup = self._record, self.worker.setup
        for name, (before, moves) in self._narrow.items():
            still = (to_local(setup.trained.parameters[name].detach()) == before) & moves
            record.unmoved[name] = float(still.sum() / max(1, int(moves.sum())))
        for name, buffer in named_buffers(setup.model):
            if buffer.is_floating_point() and not buffer.is_meta:
                record.buffers[name] = self._sketch("buffers", name, buffer)
        found = self._values(state=True)
        if found is not None:
            values, state = found
            record.values = {n: self._sketch("values", n, each) for n, each in values.items()}
            record.state = {n: self._sketch("state", n, each) for n, each in state.items()}

    def after_step(self, recorder: Any, result: StepResult, *, due: bool) -> None:
        record = self._record
        record.step = result.global_step
        if not self._own_loop and result.has_loss:
            record.losses = [result.loss]
        record.notes = sorted(self._dropout.notes)
        record.losses = [loss if math.isfinite(loss) else math.nan for loss in record.losses]
        self._file.append(record)
        self._own_examples += max([len(each) for each in record.examples], default=0)
        self._record = Record(task=record.task, layers=record.layers)
        self._hook_parameters()  # also of those that were added
        self._dropout.begin()
        self._states = states()

    def close(self) -> None:
        if self._trial.replicas > 1 and self._trial.joined == 1:
            leave(self._directory, self._trial)
        self._file.close()

    # -- tensors ---------------------------------------------------------------------------------

    def _values(
        self, *, state: bool
    ) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None:
        """Returns the values and the optimizer's state of the job; None where others record them.

        Processes that hold a model together all take part.
        """
        worker = self.worker
        task, together = worker.task, worker.setup.process_group is not None
        if task.servers and task.index:
            return None
        if not together and not worker.lifecycle.is_chief:
            return None
        found = worker.backend.snapshot(state=state)
        return (found.values, found.optimizer) if worker.lifecycle.is_chief else None

    def _sketch(self, kind: str, name: str, tensor: torch.Tensor) -> Sketch:
        whole = self._trial.settings.get("whole")
        if whole == f"{self.worker.global_step + (kind in ('computed', 'pushed'))}/{kind}/{name}":
            mine = self.worker.task.name.replace(":", "-").replace("/", "-")
            kept = tensor.detach().cpu().contiguous().clone()
            save_file({name: kept}, self._directory / f"whole-{mine}.safetensors")
        return sketch(tensor)


def _nature(setup: TrainingSetup) -> str:
    """Returns why a job cannot equal one process number by number; "" where it can."""
    settings = setup.settings
    rule, task = settings.rule, settings.task
    if not task.servers or task.trial is None:
        return ""
    name = settings.strategy.name
    if rule.codec != "none":
        return f"gradients are packed by {rule.codec}"
    if settings.prefetches:
        return f"{name} with prefetch computes each gradient from older values"
    if task.workers == 1 and rule.period == 1:
        return ""
    if not rule.synchronous:
        return f"under {name} workers compute gradients from values that others have changed since"
    if rule.period > 1:
        return f"under {name} workers train {rule.period} steps by themselves between exchanges"
    own = [type(each) for each in members(setup.optimizer)]
    if rule.every is not None and own != [torch.optim.SGD] * len(own):
        return f"under {name} each worker's {own[0].__name__} divides by its own gradients"
    if 0 < rule.aggregate < task.workers:
        return f"{name} leaves out the slowest of the {task.workers} workers"
    return ""


def _digests(rows: Sequence[torch.Tensor]) -> list[int]:
    """Returns a digest of each example of tensors of whole numbers."""
    arrays = [each.detach().cpu().contiguous().reshape(len(each), -1).numpy() for each in rows]
    found = [hashlib.blake2b(digest_size=6) for _ in (arrays[0] if arrays else ())]
    for array in arrays:
        for one, row in zip(found, array, strict=True):
            one.update(row.tobytes())
    return [int.from_bytes(each.digest(), "little") for each in found]


def _marks(rows: Sequence[torch.Tensor]) -> list[float]:
    """Returns one number of a sketch for each example."""
    flat = [each.detach().reshape(len(each), -1).to("cpu", torch.float64) for each in rows]
    joined = torch.cat(flat, 1)
    found: list[float] = (joined @ signs(joined.shape[1])).tolist()
    return found


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a parameter group, such as its learning rate."""
    found: dict[str, float] = {}
    for name, value in group.items():
        if name in ("params", "initial_lr") or name.startswith("_"):
            continue
        several = isinstance(value, (tuple, list))
        for place, each in enumerate(value if several else [value]):
            number = isinstance(each, (bool, int, float))
            if number or (isinstance(each, torch.Tensor) and each.numel() == 1):
                found[f"{name}[{place}]" if several else name] = float(each)
    return found
