"""Captures a model as a dataflow graph, with `torch.export`.

The graph is torch's training IR: composite operators (`linear`, `conv2d`, `lstm`) stay whole,
in-place operations stay in place, and autograd works through it. It holds the model's own
parameters and buffers, so that optimizer, checkpoints and running statistics go on as before. (A
functional graph, as of `run_decompositions()`, turns each change of a buffer into an output.)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from trireme.errors import ConfigurationError
from trireme.graph.capture.effects import Memory, aliased, argument, written
from trireme.graph.capture.exporting import Batch, export, quiet, refusal, sentence, tensors
from trireme.graph.capture.rebuild import copied, rebuild
from trireme.graph.capture.rehearsal import Rehearsal, difference, rehearse
from trireme.graph.capture.scopes import keep_notes
from trireme.graph.capture.source import forward_line, source_line

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Capture:
    """A model as a dataflow graph. Call it as the model."""

    # the graph, and the parameters, buffers and constants that it names. Each `call_function` node
    # has the metadata `val` (a fake tensor with shape and dtype; a dynamic batch size is a symbol),
    # `nn_module_stack`, and notes (`tracing`)
    module: fx.GraphModule
    checks: fx.GraphModule  # checks of the shapes of the inputs that the graph relies on
    training: bool  # whether the model was in training mode
    batch: Batch  # the batch size that the graph takes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output; raises as `check`."""
        self.check(*args, **kwargs)
        return self.module(*args, **kwargs)

    def flat(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Returns inputs of the model in the order of the graph's; their structure is checked."""
        codegen: Any = self.module.graph._codegen
        try:
            return list(codegen.pytree_info.in_spec.flatten_up_to((args, kwargs)))
        except ValueError as error:
            why = f"they are nested otherwise than those of the capture: {sentence(error)}"
            raise self._refusal(why) from error

    def check(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Checks inputs, also the shapes that the graph relies on, and returns them as `flat`."""
        flat = self.flat(*args, **kwargs)
        try:
            self.checks(*args, **kwargs)
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            why = f"; {self.batch.reason}" if self.batch.reason else ""
            if any(isinstance(each, int | float) for each in tree_leaves(flat)):
                why += "; numbers are constants of the graph: make those that change tensors"
            raise self._refusal(f"{sentence(error)}{why}") from error
        return flat

    def _refusal(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"the captured graph does not take these inputs: {why}. Give inputs like those of the "
            "capture, or capture again"
        )


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    verify: bool = True,
) -> Capture:
    """Captures a model in its present mode, training or evaluation.

    The batch size (dim 0 of those inputs that share it) becomes dynamic. If the model's code fixes
    it, the graph is captured for the size of the example, and a warning is logged with the reason.
    The model, its state and the random states are afterwards as before.
    """
    named = dict(kwargs or {})
    expected = None
    if verify:
        expected = rehearse(model, model, args, named)
        _refuse_custom_functions(model, expected)
    sizes = [each.shape[0] for each in tensors((args, named)) if each.dim() > 0]
    size = next(iter(sizes), None)
    program, batch = export(model, tuple(args), named, size)
    captured = _captured(model, program, batch)
    if expected is not None:
        try:
            actual = rehearse(captured, model, args, named)
        except RuntimeError as error:
            raise refusal(model, sentence(error), forward_line(model)) from error
        if differs := difference(expected, actual):
            raise refusal(
                model,
                f"the captured graph computes something else than the model: {differs}",
                forward_line(model),
                "torch.export drops hooks of tensors, which forward must not set",
            )
    if not batch.dynamic and batch.reason:
        _log.warning(
            "%s takes batches of %s examples only under --strategy graph: %s",
            type(model).__name__,
            size,
            batch.reason,
        )
    return captured


def _captured(model: nn.Module, program: ExportedProgram, batch: Batch) -> Capture:
    with quiet():
        stateful = program.module()
    assert isinstance(stateful, fx.GraphModule)
    keep_notes(stateful)
    graph = copied(stateful.graph)
    _share_attributes(graph, stateful)
    _refuse_attributes(model, graph, stateful)
    _remove_idle_detaches(graph)
    for node in graph.find_nodes(op="call_module", target="_guards_fn"):
        graph.erase_node(node)
    remove_idle_copies(graph)
    copy_for_backward(graph, stateful)
    module = rebuild(stateful, graph)
    return Capture(module, _checks(stateful), model.training, batch)


def _checks(stateful: fx.GraphModule) -> fx.GraphModule:
    graph = copied(stateful.graph)
    graph.output_node().args = ((),)
    for node in reversed(graph.nodes):
        if node.op not in ("placeholder", "output") and node.target != "_guards_fn":
            graph.erase_node(node)
    codegen = graph._codegen
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=None)  # type: ignore[attr-defined]
    values = {"_guards_fn": stateful._guards_fn} if hasattr(stateful, "_guards_fn") else {}
    return fx.GraphModule(values, graph, class_name="Checks")


def _share_attributes(graph: fx.Graph, module: nn.Module) -> None:
    """Names each tensor once: a shared parameter has a node for each of its names."""
    first: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        kept = first.setdefault(id(attrgetter(node.target)(module)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _remove_idle_detaches(graph: fx.Graph) -> None:
    """Removes `detach_` of a fresh copy of a constant, as `torch.tensor([1.0])` makes it."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.detach_.default):
        source = node.args[0]
        if isinstance(source, fx.Node) and source.target is aten.lift_fresh_copy.default:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _refuse_attributes(model: nn.Module, graph: fx.Graph, module: nn.Module) -> None:
    """Refuses random generators, and parameters with sparse gradients."""
    for node in graph.find_nodes(op="get_attr"):
        value = attrgetter(node.target)(module)
        for user in node.users:
            if isinstance(value, torch.Generator):
                why = "it draws random numbers from a torch.Generator, whose state a graph cannot"
                raise refusal(
                    model,
                    f"{why} hold",
                    source_line(user) or forward_line(model),
                    "draw them from torch's own generator, that of torch.manual_seed",
                )
            trained = getattr(value, "requires_grad", False) and isinstance(user.target, OpOverload)
            if trained and argument(user, "sparse") is True:
                raise refusal(
                    model,
                    f"the gradient of {node.target} is sparse, which tasks cannot exchange",
                    source_line(user) or forward_line(model),
                    "give the embedding sparse=False",
                )


def _refuse_custom_functions(model: nn.Module, rehearsal: Rehearsal) -> None:
    if rehearsal.functions:
        raise refusal(
            model,
            f"torch.export drops the backward pass of {', '.join(rehearsal.functions)}, a custom "
            "autograd function (as torch.utils.checkpoint with use_reentrant=True is)",
            forward_line(model),
            "make it an operator with torch.library.custom_op and register_autograd",
        )


def remove_idle_copies(graph: fx.Graph) -> None:
    """Removes copies of a buffer to itself, which torch.export puts at the end of a graph.

    They would count as changes, after which autograd refuses to use the value in backward.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, source = node.args[:2]
        while isinstance(source, fx.Node) and _returns_first_argument(source):
            source = source.args[0]
        if source is target and not node.users:
            graph.erase_node(node)


def copy_for_backward(graph: fx.Graph, module: nn.Module) -> None:
    """Gives operations copies of the buffers that the graph changes.

    Autograd keeps what an operation reads, and the next micro-batch changes the buffer before this
    one's backward.
    """
    memory = Memory(graph, module)
    buffers = {id(each) for each in module.buffers()}
    groups = {
        memory.group(node)
        for node in graph.find_nodes(op="get_attr")
        if id(attrgetter(str(node.target))(module)) in buffers and memory.changes(node)
    }
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        spared = {*written(node), *aliased(node)}
        for each in node.all_input_nodes if len(node.all_input_nodes) > 1 else ():
            if each in spared or memory.group(each) not in groups:
                continue
            if not isinstance(each.meta.get("val"), torch.Tensor):
                continue
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (each,))
            copy.meta.update(node.meta, val=each.meta["val"])
            node.replace_input_with(each, copy)


def _returns_first_argument(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or not node.args:
        return False
    returns = node.target._schema.returns
    info = returns[0].alias_info if len(returns) == 1 else None
    return info is not None and info.is_write and node.args[0] in written(node)
