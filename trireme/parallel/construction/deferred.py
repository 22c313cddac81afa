"""Deferred construction: a model without memory, of which a process makes the tensors it needs.

The constructor runs on the meta device, and a tape records the operations that make and fill the
tensors. Random numbers are drawn meanwhile, into a tensor that is freed at once, so that the
generator goes through the states of an ordinary construction; each draw is recorded with the state
before it. Later the operations are repeated that some named tensors depend on, each draw from its
own state. torchdistX (`deferred_init`, https://pytorch.org/torchdistx) records constructors in the
same way, but draws no random numbers for tensors that are left out.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_leaves, tree_map_only

from trireme.errors import ConfigurationError
from trireme.parallel.construction import construction_tape
from trireme.parallel.construction.construction_tape import (
    LARGE,
    Operation,
    Tape,
    View,
    return_free_memory,
    written,
)
from trireme.ps.module_names import own_name

_Tensor: Any = torch.Tensor
_TO_PYTHON = (_Tensor.tolist, _Tensor.numpy, _Tensor.__array__)
# What a constructor is told about its tensors, so that it does what it does on the CPU. Functions
# of `torch.nn.init` do nothing to meta tensors.
_PRETENDED: dict[Any, Any] = {
    _Tensor.device.__get__: torch.device("cpu"),
    _Tensor.is_meta.__get__: False,
    _Tensor.is_cpu.__get__: True,
}
_LIKE = ("aten::rand_like", "aten::randn_like", "aten::randint_like")
_INTERNAL = (str(Path(torch.__file__).parent), __file__, construction_tape.__file__)

_T = TypeVar("_T")


class Deferred:
    """A model whose constructor has run without memory.

    Attributes:
        model: the model. Its parameters and buffers are meta tensors until they are materialised.
        names: the names of its parameters and buffers, tied ones under each of their names.
        attributes: the names of tensors that are plain attributes of a module, such as a mask.
            They are meta tensors too, and can be materialised by these names.
    """

    def __init__(self, model: nn.Module, tape: Tape) -> None:
        self.model = model
        self._tape = tape
        self.names = tuple(_named(model))
        self.attributes = tuple(_plain(model))

    def materialise(self, names: Collection[str], device: torch.device | str = "cpu") -> None:
        """Makes exactly the named parameters and buffers real, with the values of a construction.

        The tensors stay the same objects, so that an optimizer that was made of them goes on with
        them. Tensors that share memory with a named one become real with it only if they are
        named too, or are the same object. Names of tensors that are real already are ignored.

        The process needs memory for the named tensors, and, one after the other, for what each of
        them is computed from. Random generators stay as they are.
        """
        held = _named(self.model) | _plain(self.model)
        if unknown := sorted(set(names) - held.keys()):
            raise ConfigurationError(
                f"the model has no tensor {unknown[0]!r} to materialise: use names of its "
                "parameters and buffers"
            )
        chosen = {id(held[name]): held[name] for name in names if held[name].is_meta}
        for name in names:
            if held[name].is_meta and self._tape.number(held[name]) is None:
                raise ConfigurationError(
                    f"{name} is not the tensor that the model's constructor made, so it has no "
                    "values: change tensors in the constructor, or after they are materialised"
                )
        views = {key: self._tape.view(tensor) for key, tensor in chosen.items()}
        storages = {view.storage for view in views.values()}
        real = self._tape.replay(storages, torch.device(device))
        for key, tensor in chosen.items():
            made = views[key].of(real[views[key].storage])
            made.requires_grad_(tensor.requires_grad)
            # `torch.utils.swap_tensors` refuses tensors with weak references, which torch.export
            # and nn.LSTM keep, and `.data = ` refuses to go from one device to another. The object
            # stays the same here, so weak references to it stay right.
            torch._C._swap_tensor_impl(tensor, made)


def deferred(build: Callable[[], nn.Module]) -> Deferred:
    """Runs a model's constructor without memory for its tensors.

    Random numbers are drawn, one tensor at a time, so that the generators end in the states after
    an ordinary construction. Values that the constructor reads (`.item()`, `.tolist()`) are
    computed at once. Tensors from elsewhere, such as those of NumPy arrays, stay in memory.
    """
    tape = Tape()
    recorder = _Recorder(tape)
    try:
        with _Reader(tape), recorder, _whole_initialisers(recorder):
            model = build()
    except Exception as error:
        if isinstance(error, ConfigurationError):
            raise
        place = _place(traceback.extract_tb(error.__traceback__))
        raise _refusal(f"{type(error).__name__}: {error}", place) from error
    for tensor in (_named(model) | _plain(model)).values():
        if not tensor.is_meta:
            _to_meta(tensor, tape)
    return Deferred(model, tape)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on the meta device and records them."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunction():  # or the reader would answer this recorder too
            return self._dispatched(func, args, dict(kwargs or {}))

    def _dispatched(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        if any(not tensor.is_meta for tensor in written(func, args, named)):
            raise _refusal(f"{func} changes a tensor that was made elsewhere", _place())
        args, named = tree_map_only(torch.Tensor, self._on_meta, (args, named))
        reads = [leaf for leaf in tree_iter((args, named)) if isinstance(leaf, torch.Tensor)]
        self._set_device(func, named, makes=not reads)
        if torch.Tag.inplace_view in func.tags or func._schema.name == "aten::set_":
            return func(*args, **named)
        if any(str(each.type) not in ("Tensor", "Tensor[]") for each in func._schema.returns):
            return self._evaluated(func, args, named, reads, "its result is no tensor")
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._drawn(func, args, named)
        try:
            return self._recorded(func, args, named)
        except (NotImplementedError, RuntimeError) as error:
            return self._evaluated(func, args, named, reads, str(error))

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise _refusal(f"a tensor is on {tensor.device}, of {tensor.layout}", _place())
        return self._tape.constant(tensor)

    def _set_device(
        self, func: torch._ops.OpOverload, named: dict[str, Any], *, makes: bool
    ) -> None:
        if not _accepts(func, "device"):
            return
        device = named.get("device")
        # A program reads `meta` from its own tensors, and means the device of those.
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            raise _refusal(f"{func} makes a tensor on {device}", _place())
        if makes or device is not None:
            named["device"] = torch.device("meta")
        if named.get("pin_memory"):
            named["pin_memory"] = False

    def _recorded(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Runs an operator on the meta device, and records it if it fills or makes memory."""
        tape = self._tape
        positional, keywords = tree_map_only(torch.Tensor, tape.view, (args, named))
        changed = frozenset(tape.add_storage(tensor) for tensor in written(func, args, named))
        known = len(tape)
        results = func(*args, **named)
        leaves = tree_leaves(results, is_leaf=lambda leaf: leaf is None)
        views = [tape.view(each) if isinstance(each, torch.Tensor) else None for each in leaves]
        made = frozenset(view.storage for view in views if view and view.storage >= known)
        if changed or made:  # else it is a view
            if keywords.get("device") is not None:
                keywords["device"] = torch.device("cpu")
            makes = not any(isinstance(leaf, torch.Tensor) for leaf in tree_iter((args, named)))
            if makes and views[0] is not None and _accepts(func, "dtype"):
                keywords["dtype"] = views[0].dtype  # the default may be another one later
            tape.operations.append(Operation(func, positional, keywords, changed, views, made))
        return results

    def _drawn(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Records an operator that draws random numbers, and draws them."""
        given = named.get("generator")
        if "generator" in named:
            named["generator"] = None  # a generator of the CPU is refused on the meta device
        results = self._recorded(func, args, named)
        operation = self._tape.operations.pop()
        if given is not None:
            operation.kwargs["generator"] = given
        self._draw(operation, given)
        return results

    def initialise(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records a function as a whole that fills its first argument with random numbers."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self._initialised(call, args, kwargs)
        return args[0]

    def _initialised(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        tape, tensor = self._tape, args[0]
        positional, keywords = tree_map_only(torch.Tensor, tape.view, (args, kwargs))
        changed = frozenset([tape.add_storage(tensor)])
        operation = Operation(call, positional, keywords, changed, [None], frozenset())
        self._draw(operation, next(iter(_flat(args, kwargs, torch.Generator)), None))

    def _draw(self, operation: Operation, given: torch.Generator | None) -> None:
        generator = torch.default_generator if given is None else given
        state = generator.get_state()
        views = _flat(operation.args, operation.kwargs, View)
        if _by_shape(operation, views):
            with torch.no_grad():
                operation.run(lambda view: view.scratch())
        else:  # how many numbers are drawn may depend on values
            storages = {view.storage for view in views}
            real = self._tape.replay(storages, torch.device("cpu"))
            with torch.no_grad():
                operation.run(lambda view: view.of(real[view.storage]))
        if any(view.nbytes >= LARGE for view in views):
            return_free_memory()
        self._tape.operations.append(replace(operation, generator=generator, state=state))

    def _evaluated(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        named: dict[str, Any],
        reads: list[torch.Tensor],
        why: str,
    ) -> Any:
        """Computes an operation at once, whose result depends on values."""
        if any(True for _ in written(func, args, named)):
            raise _refusal(f"{func}: {why}", _place())
        values = self._tape.values(reads)
        known = {id(meta): value for meta, value in zip(reads, values, strict=True)}
        own = tree_map_only(torch.Tensor, lambda meta: known[id(meta)], (args, named))
        if own[1].get("device") is not None:
            own[1]["device"] = torch.device("cpu")
        results = func(*own[0], **own[1])
        return tree_map_only(torch.Tensor, self._tape.constant, results)


class _Reader(TorchFunctionMode):
    """Answers what a constructor asks about tensors, and for their values, as on the CPU."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self,
        func: Any,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _PRETENDED:
            return _PRETENDED[func]
        if func in _TO_PYTHON and args[0].is_meta:
            with _disable_current_modes():
                values = self._tape.values([args[0]])
                return func(*values, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def _whole_initialisers(recorder: _Recorder) -> Iterator[None]:
    """Records `nn.init.trunc_normal_` as one operation.

    It draws until no value is outside its bounds. Recorded operation by operation, each look at the
    values would repeat all draws before it.
    """
    name = "_no_grad_trunc_normal_"
    original = getattr(nn.init, name, None)
    if original is None:  # another version of torch; slower, and right too
        yield
        return
    setattr(nn.init, name, partial(recorder.initialise, original))
    try:
        yield
    finally:
        setattr(nn.init, name, original)


def _by_shape(operation: Operation, views: list[View]) -> bool:
    """Returns whether the draws of an operation depend on no values, but on the shapes alone."""
    if not views or getattr(operation.call, "_schema", None) is None:
        return True
    alone = len(views) == 1 and operation.writes == {views[0].storage}
    return alone or operation.call._schema.name in _LIKE  # type: ignore[attr-defined]


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[_T]) -> list[_T]:
    return [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, kind)]


def _accepts(func: torch._ops.OpOverload, name: str) -> bool:
    return any(argument.name == name for argument in func._schema.arguments)


def _to_meta(tensor: torch.Tensor, tape: Tape) -> None:
    """Makes a real tensor of the model a meta tensor, whose values the tape keeps."""
    meta = tape.constant(tensor.detach())
    meta.requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, meta)


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return {own_name(name): tensor for group in (parameters, buffers) for name, tensor in group}


def _plain(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors that are plain attributes of modules; not those with a history."""
    return {
        own_name(f"{path}.{name}" if path else name): value
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is None
    }


def _place(frames: traceback.StackSummary | None = None) -> str:
    """Returns the innermost line of the program itself, as `FILE, line N: CODE`."""
    found = traceback.extract_stack() if frames is None else frames
    own = [frame for frame in found if not frame.filename.startswith(_INTERNAL)]
    frame = (own or list(found))[-1]
    return f"{frame.filename}, line {frame.lineno}: {frame.line}"


def _refusal(why: str, place: str) -> ConfigurationError:
    return ConfigurationError(
        f"the model cannot be built without memory for all of it ({place}): {why}. Do without "
        "this in the constructor, or let each process build the whole model: pass the model "
        "itself instead of a function, where it fits"
    )


@contextmanager
def with_untouched_memory(model: nn.Module) -> Iterator[None]:
    """Gives the meta parameters of a model memory on the CPU that is neither read nor written.

    The system lends such memory without having it: so a model can be traced, which needs shapes,
    dtypes and devices, in a process that could not hold its values.
    """
    lent = [
        (
            parameter,
            torch.empty_like(parameter, device="cpu", requires_grad=parameter.requires_grad),
        )
        for parameter in model.parameters()
        if parameter.is_meta
    ]
    for parameter, memory in lent:
        torch._C._swap_tensor_impl(parameter, memory)
    try:
        yield
    finally:
        for parameter, memory in lent:
            torch._C._swap_tensor_impl(parameter, memory)
