"""Deferred construction: a model without memory, of which a process makes the parameters it needs.

The constructor runs on the meta device. To fill parameters it runs again: those that are wanted
become real, and each other one becomes a meta tensor as soon as a module registers it. Random
numbers for a meta tensor are drawn into memory that is freed at once, so the generator goes through
the states of an ordinary construction, and the values are those of one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trireme.errors import ConfigurationError
from trireme.session.model.module_names import own_name

_Tensor: Any = torch.Tensor
_PRETENDED: dict[Any, Any] = {  # so that a constructor does what it does on the CPU
    _Tensor.device.__get__: torch.device("cpu"),
    _Tensor.is_meta.__get__: False,
}


class Deferred:
    """A `model` whose constructor has run without memory.

    Its parameters are meta tensors until they are materialised; buffers, and tensors that are plain
    attributes of modules, are real.
    """

    def __init__(self, build: Callable[[], nn.Module], seed: Callable[[], None]) -> None:
        self._build = build
        self._seed = seed
        self._registered: list[nn.Parameter] = []
        seed()
        try:
            with _registering(self._registered.append), torch.device("meta"):
                self.model = build()
        except ConfigurationError:
            raise
        except Exception as error:
            raise _refusal(error) from error
        self.materialise(())

    def materialise(self, names: Collection[str]) -> None:
        """Makes the named parameters real, with the values of an ordinary construction.

        The tensors stay the same objects, so that an optimizer that was made of them goes on with
        them. The process needs memory for the named ones, and for one other parameter at a time.
        """
        tensors = _tensors(self.model)
        wanted = {id(tensors[name]) for name in names}
        other = {id(tensor) for tensor in tensors.values()} - wanted
        # Parameters that are not the model's are those of layers of which it has copies.
        left = iter([id(parameter) not in other for parameter in self._registered])

        def keep(parameter: nn.Parameter) -> nn.Parameter | None:
            if next(left, False) or parameter.is_meta:
                return None
            return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

        self._seed()
        try:
            with _registering(keep), _Drawing(), _Pretending(), _real_draws():  # type: ignore[no-untyped-call]
                made = _tensors(self._build())
        except Exception as error:
            raise _refusal(error) from error
        parameters = {id(parameter) for parameter in self._registered}
        for name, tensor in tensors.items():
            if tensor.is_meta and (id(tensor) in wanted or id(tensor) not in parameters):
                real = made[name].detach().requires_grad_(tensor.requires_grad)
                if real.is_meta:
                    raise _refusal(ValueError(f"{name} is made otherwise each time"))
                # `torch.utils.swap_tensors` refuses tensors with weak references, which
                # torch.export and nn.LSTM keep. The object stays the same here.
                torch._C._swap_tensor_impl(tensor, real)


@contextmanager
def with_untouched_memory(model: nn.Module) -> Iterator[None]:
    """Gives the meta parameters of a model memory on the CPU that is neither read nor written.

    The system lends such memory without having it: so a model can be traced, which needs shapes,
    dtypes and devices, in a process that could not hold its values.
    """
    meta = [each for each in model.parameters() if each.is_meta]
    lent = [torch.empty_like(each, device="cpu", requires_grad=each.requires_grad) for each in meta]
    for parameter, memory in zip(meta, lent, strict=True):
        torch._C._swap_tensor_impl(parameter, memory)
    try:
        yield
    finally:
        for parameter, memory in zip(meta, lent, strict=True):
            torch._C._swap_tensor_impl(parameter, memory)


@contextmanager
def _registering(call: Callable[[nn.Parameter], nn.Parameter | None]) -> Iterator[None]:
    """Replaces each parameter that a module registers, or that is a copy of one."""
    original = nn.Parameter.__deepcopy__

    def copied(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        made = original(self, memo)  # type: ignore[no-untyped-call]
        memo[id(self)] = made if (other := call(made)) is None else other
        return memo[id(self)]  # type: ignore[no-any-return]

    register: Any = register_module_parameter_registration_hook
    hook = register(lambda module, name, each: call(each))
    nn.Parameter.__deepcopy__ = copied  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Parameter.__deepcopy__ = original  # type: ignore[method-assign]
        hook.remove()


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the random numbers of meta tensors too."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = args, dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            meta = [each for each in tree_leaves(given) if _is_meta(each)]
            if meta:
                scratch = tree_map_only(torch.Tensor, _scratch, given)
                func(*scratch[0], **scratch[1])
                given[1].pop("generator", None)
        return func(*given[0], **given[1])


class _Pretending(TorchFunctionMode):
    """Answers what a constructor asks about tensors as on the CPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _PRETENDED[func] if func in _PRETENDED else func(*args, **(kwargs or {}))


@contextmanager
def _real_draws() -> Iterator[None]:
    """Has `nn.init.trunc_normal_`, which looks at the values that it draws, draw real ones."""
    name = "_no_grad_trunc_normal_"
    original = getattr(nn.init, name)

    def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        original(_scratch(tensor), *args, **kwargs)
        return tensor

    setattr(nn.init, name, drawn)
    try:
        yield
    finally:
        setattr(nn.init, name, original)


def _is_meta(value: Any) -> bool:
    with torch._C.DisableTorchFunction():
        return isinstance(value, torch.Tensor) and value.is_meta


def _scratch(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_meta(tensor):
        return tensor
    with torch._C.DisableTorchFunction():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters, buffers and plain attributes that are tensors, under each name."""
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
        *(
            (f"{path}.{name}".lstrip("."), value)
            for path, module in model.named_modules(remove_duplicate=False)
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor) and value.grad_fn is None
        ),
    )
    return {own_name(name): tensor for name, tensor in named}


def _refusal(error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"the model cannot be built without memory for all of it: {type(error).__name__}: {error}. "
        "Do without this in the constructor, or let each process build the whole model: leave out "
        "GraphConfig(example=...), where it fits"
    )
