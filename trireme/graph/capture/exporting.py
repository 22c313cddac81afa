"""Calls `torch.export`, with a dynamic batch size where the model allows it."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils._pytree import tree_leaves, tree_map_only

from trireme.errors import ConfigurationError
from trireme.graph.capture.rehearsal import restored
from trireme.graph.capture.scopes import noting
from trireme.graph.capture.source import error_line, forward_line

_UNKNOWN = re.compile(r"(?:Found|Unsupported input type) <class '([\w.<>]+)'>")


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch size that a graph takes."""

    size: int | None  # the batch size of the example; None if no input has one
    dynamic: bool  # whether the graph takes other sizes
    reason: str = ""  # why it does not; "" if it does


def export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int | None
) -> tuple[ExportedProgram, Batch]:
    """Exports a model with a dynamic batch size, else with that of the example."""
    reason = ""
    if size is not None:
        given, named = _doubled((args, kwargs)) if size == 1 else (args, kwargs)
        try:
            program = _exported(model, given, named, 2 if size == 1 else size)
        except Exception as error:
            reason = f"torch.export fails with a dynamic one: {sentence(error)}"
        else:
            if _has_symbols(program):
                return program, Batch(size, dynamic=True)
            guards = "; ".join(program._guards_code).replace("L['", "").replace("']", "")
            reason = f"the model's code fixes it ({guards or 'no input keeps it'})"
    try:
        program = _exported(model, args, kwargs, None)
    except Exception as error:
        # Loads slowly, and every session imports this module.
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        what = sentence(error)
        if isinstance(error, GuardOnDataDependentSymNode):
            what = "its Python code depends on the value of a tensor (an if, a loop, a print)"
        if unknown := _UNKNOWN.search(str(error)):
            what = f"it takes or returns a {unknown[1]}, whose tensors torch does not know"
            remedy = "call torch.export.register_dataclass on it, or use a tuple or a dict"
            raise refusal(model, what, forward_line(model), remedy) from error
        raise refusal(model, what, error_line(error, model)) from error
    return program, Batch(size, dynamic=False, reason=reason)


def _exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int | None
) -> ExportedProgram:
    dynamic = None
    if size is not None:
        sizes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
        for tensor in tensors((args, kwargs)):
            if tensor.dim() > 0 and tensor.shape[0] == size:
                # AUTO gives each input a size of its own, and finds out which ones are the same.
                sizes[tensor] = {0: Dim.AUTO}
        dynamic = sizes.dynamic_shapes(model, args, kwargs)
    with restored(model), torch.enable_grad(), quiet(), noting():
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what torch.export says besides its errors.

    It warns of the lists in which nn.LSTM keeps its weights and of its own deprecated calls, and
    prints the whole graph when it fails.
    """
    symbols = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = symbols.level
    symbols.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.filterwarnings("ignore", message="(?s).*assigned during export")
            warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")
            yield
    finally:
        symbols.setLevel(level)


def refusal(
    model: nn.Module,
    what: str,
    line: str,
    remedy: str = "compute it with tensors (torch.where, torch.cond), or do it outside forward",
) -> ConfigurationError:
    """Returns the error that says that a model cannot be captured."""
    where = f" ({line})" if line else ""
    return ConfigurationError(
        f"--strategy graph cannot capture {type(model).__name__}: {what}{where}: {remedy}, or take "
        "another strategy, none of which captures the model"
    )


def tensors(values: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested values, in order."""
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _doubled(values: Any) -> Any:
    # torch.export takes a size of 1 for a constant.
    def double(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != 1:
            return tensor
        return torch.cat([tensor, tensor]).detach().requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, double, values)


def _has_symbols(program: ExportedProgram) -> bool:
    """Returns whether an input of an exported program has a size that is not a constant."""
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name in inputs and isinstance(value, torch.Tensor):
            sizes: list[Any] = list(value.shape)
            symbols = (size.node for size in sizes if isinstance(size, torch.SymInt))
            if any(symbol.maybe_as_int() is None for symbol in symbols):
                return True
    return False


def sentence(error: BaseException) -> str:
    """Returns the first line of an error's message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
