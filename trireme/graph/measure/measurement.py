"""Measures what the operators of a captured model cost, one by one, on this machine.

Each operator gets random inputs of the shapes, strides and dtypes that the capture has noted, and
never the model's own tensors: so one can measure a model that does not fit in this machine's
memory, whose parameters are on the `meta` device.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate, map_arg
from torch.utils._pytree import tree_unflatten

from trireme.graph.capture.capture import Capture
from trireme.graph.capture.exporting import sentence, tensors
from trireme.graph.execute.sizes import symbols
from trireme.graph.measure.trial import Input, Trial, Trials, timed

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cost:
    """What one operator costs for one micro-batch."""

    forward_seconds: float = 0.0  # how long it computes
    backward_seconds: float = 0.0  # how long its backward computation takes; 0 if it has none
    # what autograd keeps from its forward to its backward computation: its own value, if anything
    # keeps that or a view of it, and what it keeps besides. No parameters, and no values of other
    # operators, which count there
    activation_bytes: int = 0
    output_bytes: int = 0  # its value, or its values together
    differentiable: bool = False  # whether its value has a gradient


@dataclass(frozen=True)
class Measurement:
    """What a captured model costs for one micro-batch."""

    costs: Mapping[str, Cost]  # of each `call_function` node that has tensors, by its name
    loss: Cost  # the cost of the loss function; zero if there was none
    segment_seconds: float = 0.0  # what a call of a graph takes besides, forward and backward
    accumulation_byte_seconds: float = 0.0  # to add a gradient to those before

    @property
    def seconds(self) -> float:
        """How long all of it takes, forward and backward, without transfers and updates."""
        every = [*self.costs.values(), self.loss]
        return sum(each.forward_seconds + each.backward_seconds for each in every)


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
    fakes = [node.meta.get("val") for node in captured.module.graph.find_nodes(op="placeholder")]
    sizes = symbols(fakes, captured.flat(*args, **(kwargs or {})))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        return _Measuring(captured.module, sizes, repeats, budget_seconds).measure(loss)


def has_tensors(node: fx.Node) -> bool:
    """Returns whether a node is an operator: it makes tensors, or has an effect only."""
    if node.op != "call_function":
        return False
    value = node.meta.get("val")
    return value is None or bool(tensors(value))


def _accumulation_byte_seconds() -> float:
    """Measures the addition of gradients, on tensors that do not all fit into a core's cache."""
    tensors = [torch.zeros(1 << 17) for _ in range(12)]

    def add() -> None:
        for one, other in zip(tensors[:6], tensors[6:], strict=True):
            one += other

    took = statistics.median(timed(add)[0] for _ in range(5))
    return took / sum(each.nbytes for each in tensors[:6])


Value = tuple[fx.Node, int]
"""One of the tensors that a node makes, by its place."""


class _Measuring:
    def __init__(
        self, module: fx.GraphModule, sizes: Mapping[Any, int], repeats: int, seconds: float
    ) -> None:
        self._module = module
        self._graph = module.graph
        self._sizes = sizes
        self._trials = Trials(repeats)
        self._until = time.perf_counter() + seconds
        self._left = 1
        self._known: dict[str, Trial] = {}
        # What is known of the tensors of the nodes so far.
        self._trained: dict[Value, bool] = {}
        self._owners: dict[Value, Value] = {}
        self._kept: set[Value] = set()

    def measure(self, loss: Callable[[Any], torch.Tensor] | None) -> Measurement:
        nodes = [node for node in self._graph.nodes if has_tensors(node)]
        # At most as many differ as these; with what is trained they differ no further, mostly.
        self._left = len({self._key(node) for node in nodes}) + 1
        for node in self._graph.find_nodes(op="get_attr"):
            attribute = attrgetter(node.target)(self._module)
            if isinstance(attribute, torch.Tensor):
                self._trained[node, 0] = attribute.requires_grad
        found = {node: self._tried(node) for node in nodes}
        for node, trial in found.items():
            self._keep(node.all_input_nodes, trial)
            self._kept.update(self._owner((node, place)) for place in trial.kept_outputs)
        last = Trial(0.0, 0.0, (), ())
        if loss is not None:
            last, sources = self._tried_loss(loss)
            self._keep(sources, last)
        costs = {node.name: self._cost(node, trial) for node, trial in found.items()}
        ending = Cost(last.forward_seconds, last.backward_seconds, last.kept_bytes)
        return Measurement(costs, ending, self._trials.call_seconds, _accumulation_byte_seconds())

    def _tried(self, node: fx.Node) -> Trial:
        if node.target is getitem:
            return self._taken(node)
        key = self._key(node)
        if key not in self._known:
            self._known[key] = self._run(node)
        trial = self._known[key]
        sources = node.all_input_nodes
        for place, (trained, shared) in enumerate(zip(trial.trained, trial.shares, strict=True)):
            self._trained[node, place] = trained
            if shared is not None:
                self._owners[node, place] = self._owner((sources[shared], 0))
        return trial

    def _taken(self, node: fx.Node) -> Trial:
        source, place = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(place, int)
        trained = self._trained.get((source, place), False)
        self._trained[node, 0] = trained
        self._owners[node, 0] = self._owner((source, place))
        return Trial(0.0, 0.0, (trained,), (0,))

    def _run(self, node: fx.Node) -> Trial:
        sources = node.all_input_nodes
        places = {source: place for place, source in enumerate(sources)}
        target: Any = node.target
        # Constants go where everything is measured, and not to the meta device, say.
        arguments = map_aggregate(
            (node.args, node.kwargs),
            lambda each: torch.device("cpu") if isinstance(each, torch.device) else each,
        )

        def compute(*inputs: Any) -> Any:
            args, kwargs = map_arg(arguments, lambda each: inputs[places[each]])
            return target(*args, **kwargs)

        mutable = not isinstance(target, OpOverload) or target._schema.is_mutable
        try:
            return self._trials.run(
                compute,
                [self._input(source) for source in sources],
                seconds=self._share(),
                mutable=mutable,
                read=self._read(node),
            )
        except RuntimeError as error:
            _log.warning(
                "%s (%s) does not take random inputs, and counts as if it took no time: %s",
                node.name,
                target,
                sentence(error),
            )
            outputs = len(tensors(node.meta.get("val")))
            return Trial(0.0, 0.0, (False,) * outputs, (None,) * outputs)

    def _tried_loss(self, loss: Callable[[Any], torch.Tensor]) -> tuple[Trial, list[fx.Node]]:
        node = self._graph.output_node()
        sources = node.all_input_nodes
        places = {source: place for place, source in enumerate(sources)}
        codegen: Any = self._graph._codegen

        def compute(*inputs: Any) -> Any:
            leaves: Any = map_arg(node.args[0], lambda each: inputs[places[each]])
            return loss(tree_unflatten(leaves, codegen.pytree_info.out_spec))

        inputs = [self._input(source) for source in sources]
        return self._trials.run(compute, inputs, seconds=self._share(), mutable=True), sources

    def _share(self) -> float:
        share = (self._until - time.perf_counter()) / max(self._left, 1)
        self._left -= 1
        return share

    def _read(self, node: fx.Node) -> frozenset[int] | None:
        """Returns which of the tensors of a node are read; None for all."""
        if isinstance(node.meta.get("val"), torch.Tensor):
            return None
        users = [user for user in node.users if user.users]
        if not all(user.target is getitem for user in users):
            return None
        return frozenset(int(user.args[1]) for user in users)  # type: ignore[arg-type]

    def _input(self, node: fx.Node) -> Input:
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(self._module)
            if isinstance(value, torch.Tensor):
                meta = value.detach().to("meta")
                return Input(meta, value.requires_grad, resident=True)
            return Input(value)
        return Input(self._sized(node.meta.get("val")), self._trained.get((node, 0), False))

    def _sized(self, value: Any) -> Any:
        """Returns a fake tensor as a tensor of the meta device, and a symbol as a number."""
        if isinstance(value, torch.Tensor):
            shape = [self._sized(size) for size in value.shape]
            strides = [self._sized(stride) for stride in value.stride()]
            return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            kinds: dict[Any, Any] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
            return kinds[type(value)](value.node.expr.subs(self._sizes))
        return value

    def _key(self, node: fx.Node) -> str:
        """Returns a text that is equal for operators that compute the same."""
        places = {source: place for place, source in enumerate(node.all_input_nodes)}

        def described(source: fx.Node) -> Any:
            each, value = self._input(source), str(source.target)
            if isinstance(each.value, torch.Tensor):
                tensor = each.value
                value = f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"
            elif not isinstance(each.value, torch.nn.Module):
                value = repr(each.value)
            return f"<{places[source]}: {value}, {each.trained}, {each.resident}>"

        arguments = map_arg((node.args, node.kwargs), described)
        return f"{node.target} {arguments} {sorted(self._read(node) or ())}"

    def _owner(self, value: Value) -> Value:
        return self._owners.get(value, value)

    def _keep(self, sources: Sequence[fx.Node], trial: Trial) -> None:
        self._kept.update(self._owner((sources[place], 0)) for place in trial.kept_inputs)

    def _cost(self, node: fx.Node, trial: Trial) -> Cost:
        sizes = [self._sized(each).nbytes for each in tensors(node.meta.get("val"))]
        own = sum(size for place, size in enumerate(sizes) if (node, place) in self._kept)
        return Cost(
            trial.forward_seconds,
            trial.backward_seconds,
            trial.kept_bytes + own,
            sum(sizes),
            any(trial.trained),
        )
