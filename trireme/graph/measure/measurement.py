"""Measures what the operators of a captured model cost, one by one, on this machine.

The graph is computed once with fake tensors: that shows the inputs of each operator, and what
autograd keeps for backward. Then each operator is timed with random inputs of the same shapes,
strides and dtypes, never with the model's own tensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from trireme.graph.capture.capture import Capture
from trireme.graph.capture.exporting import sentence, tensors
from trireme.graph.execute.node_groups import has_tensors
from trireme.graph.measure.trial import Trials
from trireme.graph.place.costs import Operation

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measurement:
    """What a captured model costs for one micro-batch."""

    costs: Mapping[str, Operation]  # of each `call_function` node that has tensors, by its name
    loss: Operation  # the cost of the loss function; zero if there was none
    segment_seconds: float = 0.0  # what a call of a graph takes besides, forward and backward


def measure(
    captured: Capture,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    repeats: int = 30,
    budget_seconds: float = 3.0,
) -> Measurement:
    """Measures the operators of a captured model on the CPU, with as many threads as torch has.

    Each duration is the median of repeated runs. Equal operators are measured once. Integers and
    booleans are zeros, which are valid indices; other inputs are random and positive. The tensors
    of one operator exist at a time. The random state is afterwards as before.
    """
    given = captured.flat(*args, **(kwargs or {}))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            computed = _Computed(captured.module)
            computed.run(*tree_map_only(torch.Tensor, _fake, given), enable_io_processing=False)
            if loss is not None:
                computed.compute_loss(loss)
        trials = Trials(repeats)
        until = time.perf_counter() + budget_seconds
        timed = dict[str, tuple[float, float]]()
        costs, left = {}, len({call.key for call in computed.calls.values()})
        for node, call in computed.calls.items():
            if call.key not in timed:
                share = (until - time.perf_counter()) / max(left, 1)
                timed[call.key], left = _timed(trials, node, call, share), left - 1
            costs[node.name] = Operation(
                node.name,
                (),
                *timed[call.key],
                # Its own value, if autograd keeps that or a view of it, and what it keeps besides:
                # no parameters, and no values of other operators, which count there.
                activation_bytes=computed.kept.get(node, 0),
                output_bytes=sum(each.nbytes for each in call.outputs),
                differentiable=any(each.requires_grad for each in call.outputs),
            )
        ending = captured.module.graph.output_node().name
        of_loss = costs.pop(ending, Operation(ending, differentiable=False))
        return Measurement(costs, of_loss, trials.call_seconds)


def is_operator(node: fx.Node) -> bool:
    """Returns whether a node makes tensors, or has an effect only."""
    return node.op == "call_function" and has_tensors(node)


def _fake(tensor: torch.Tensor, *, trained: bool = False) -> torch.Tensor:
    shape, stride = tuple(tensor.shape), tensor.stride()
    made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(trained)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of an operator, with fake tensors."""

    target: Callable[..., Any]
    leaves: list[Any]  # of its arguments
    nesting: TreeSpec
    outputs: list[torch.Tensor]
    resident: frozenset[int]  # which leaves are parameters, buffers or constants
    read: frozenset[int] | None  # which outputs others read; None for all

    @property
    def key(self) -> str:
        """A text that is equal for calls that compute the same."""
        described = [
            f"{tuple(each.shape)} {each.stride()} {each.dtype} {each.requires_grad}"
            if isinstance(each, torch.Tensor)
            else f"module {id(each)}"
            if isinstance(each, torch.nn.Module)
            else repr(each)
            for each in self.leaves
        ]
        read = sorted(self.read or ())
        return f"{self.target} {described} {self.nesting} {sorted(self.resident)} {read}"


class _Computed(fx.Interpreter):
    """A graph, computed with fake tensors."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.calls: dict[fx.Node, _Call] = {}  # of the loss at the node of the outputs
        self.kept: dict[fx.Node, int] = {}  # the bytes that autograd keeps, by what made them
        self._makers: dict[int, fx.Node | None] = {}  # of storages; None for what is there anyway
        self._resident: set[int] = set()
        self._counted: dict[int, torch.Tensor] = {}  # held, so that no other gets the same address

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr":
            value = attrgetter(str(n.target))(self.module)
            if isinstance(value, torch.Tensor):
                value = _fake(value, trained=value.requires_grad)
                self._resident.add(_storage(value))
        elif is_operator(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            assert callable(n.target)
            return self._called(n, n.target, args, kwargs)
        else:
            value = super().run_node(n)
        if n.op in ("get_attr", "placeholder"):
            self._makers |= {_storage(each): None for each in tensors(value)}
        return value

    def compute_loss(self, loss: Callable[[Any], torch.Tensor]) -> None:
        """Computes the loss of the outputs."""
        graph: Any = self.module.graph
        leaves, _ = self.fetch_args_kwargs_from_env(node := graph.output_node())
        nesting = graph._codegen.pytree_info.out_spec
        try:
            self._called(
                node, lambda *each: loss(tree_unflatten(list(each), nesting)), tuple(leaves[0]), {}
            )
        except Exception as error:  # it looks at values, of which fake tensors have none
            _log.debug("the loss cannot be measured: %s", error)

    def _called(
        self, node: fx.Node, target: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        # Constants are made where everything is measured.
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        leaves, nesting = tree_flatten((args, kwargs))
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.detach())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = target(*args, **kwargs)
        outputs = tensors(value)
        for each in outputs:
            self._makers.setdefault(_storage(each), node)
            self._counted.setdefault(id(each), each)
        for each in saved:
            storage = _storage(each)
            maker = self._makers.setdefault(storage, node)
            if maker is not None and storage not in self._counted:
                self._counted[storage] = each
                size = each.untyped_storage().nbytes()
                self.kept[maker] = self.kept.get(maker, 0) + size
        resident = frozenset(
            place
            for place, each in enumerate(leaves)
            if isinstance(each, torch.Tensor) and _storage(each) in self._resident
        )
        users = [user for user in node.users if user.users]
        read: frozenset[int] | None = None
        if node.users and all(user.target is getitem for user in node.users):
            read = frozenset(int(user.args[1]) for user in users)  # type: ignore[arg-type]
        self.calls[node] = _Call(target, leaves, nesting, outputs, resident, read)
        return value


def _timed(trials: Trials, node: fx.Node, call: _Call, seconds: float) -> tuple[float, float]:
    """Returns how long a call takes forward and backward."""
    target = call.target
    if target is getitem:
        return 0.0, 0.0

    def compute(leaves: Sequence[Any]) -> Any:
        args, kwargs = tree_unflatten(list(leaves), call.nesting)
        return target(*args, **kwargs)

    try:
        return trials.run(
            compute,
            call.leaves,
            resident=call.resident,
            seconds=seconds,
            mutable=not isinstance(target, OpOverload) or target._schema.is_mutable,
            read=call.read,
        )
    except RuntimeError as error:
        _log.warning(
            "%s (%s) does not take random inputs, and counts as if it took no time: %s",
            node.name,
            node.target,
            sentence(error),
        )
        return 0.0, 0.0


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
