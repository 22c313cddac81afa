"""Decides where the operations of a captured model are computed: one process does for all."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

import msgspec
import torch
from torch import nn

from trireme.graph.capture.capture import Capture, capture
from trireme.graph.capture.optimise import optimised
from trireme.graph.capture.scopes import requested
from trireme.graph.config import GraphConfig
from trireme.graph.drawing.picture import Picture
from trireme.graph.drawing.text import placement_table
from trireme.graph.measure.cost_graph import OUTPUT, cost_graph, grouping
from trireme.graph.measure.measurement import Measurement, measure
from trireme.graph.measure.updates import state_factor, update_seconds
from trireme.graph.place.costs import CostGraph, Hardware
from trireme.graph.place.placement import Placement, place
from trireme.graph.place.requests import matched, resolve
from trireme.ps.optimizers import members
from trireme.session.loss import Loss, scalar
from trireme.tensors import map_tensors


@dataclass(frozen=True, eq=False)
class Example:
    """A call of the model, whose duration is measured."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss | None = None
    targets: Any = None


class Decision(msgspec.Struct, frozen=True):
    """Where each operation is computed: what one process tells the others."""

    placement: dict[str, int] = {}  # the place of each operation, parameter and buffer, by node
    output: int = 0  # the place that receives the model's outputs
    summary: str = ""  # what was decided and why, in a sentence
    warnings: tuple[str, ...] = ()  # requests of the program that cannot be met
    table: str = ""  # the placement as a table, where it is to be logged
    modules: dict[str, str] = {}  # the name of the place of most operations of each module
    error: str = ""  # why there is no placement; "" if there is one


@dataclass(frozen=True)
class Decider:
    """Measures the operations of a captured model, and places them."""

    config: GraphConfig  # what the program and the launch request
    state_factor: float = 0.0  # the bytes of optimizer state for each byte of parameters
    update_seconds: float = 0.0  # how long the optimizer takes for each byte of a parameter
    servers: int = 0  # the number of parameter servers
    warning: str = ""  # what a user should know of the optimizer; "" if nothing

    @classmethod
    def of(cls, config: GraphConfig, optimizer: torch.optim.Optimizer, servers: int) -> Self:
        """Returns one for a program's optimizer, or several, of which the largest costs count."""
        each = members(optimizer)
        update = 0.0 if servers else max(map(update_seconds, each))
        kinds = map(type, each)
        others = [it.__name__ for it in kinds if not it.__module__.startswith("torch.optim.")]
        warning = ""
        if others and not servers:
            warning = (
                f"each task updates its own parameters with {', '.join(others)}: where that is no "
                "optimizer that updates each parameter by itself (LAMB's trust ratio is of one "
                "parameter, a norm of all gradients is not), the numbers are not those of one "
                "process"
            )
        return cls(config, max(map(state_factor, each)), update, servers, warning)

    def decide(
        self,
        captured: Capture,
        model: nn.Module,
        example: Example,
        *,
        hardware: Hardware,
        homes: Mapping[str, str],
    ) -> tuple[Decision, Picture]:
        """Returns where each operation is computed, and what is to be shown of it.

        Raises:
            ConfigurationError: a request is malformed or names nothing, or no placement is found.
        """
        config, module, graph = self.config, captured.module, captured.module.graph
        wanted = {**matched(graph, config.placement), **requested(module, model), **homes}
        names = {node.name: str(node.target) for node in graph.find_nodes(op="get_attr")}
        parameters = frozenset(
            node
            for node, name in names.items()
            if isinstance(attrgetter(name)(module), nn.Parameter)
        )
        groups = grouping(captured, parameters & wanted.keys()).together
        costs = cost_graph(
            captured,
            self.measure(captured, example),
            state_factor=self.state_factor,
            update_seconds=self.update_seconds,
        )
        requests = resolve(
            wanted,
            groups,
            list(costs.positions),
            list(hardware.numbers),
            parameters=parameters,
            servers=self.servers,
            soft=config.soft,
            names=names,
        )
        placement = place(
            costs,
            hardware,
            requests.constraints,
            micro_batches=config.pieces,
            algorithm=config.algorithm,  # type: ignore[arg-type]
        )
        picture = Picture.of(
            module, placement, costs, hardware, config.pieces, type(model).__name__
        )
        numbers = {name: hardware.numbers[device] for name, device in placement.devices.items()}
        decision = Decision(
            numbers,
            numbers[OUTPUT],
            _summary(placement, costs, config.pieces, free=not requests.constraints.pinned),
            requests.unmet,
            placement_table(picture) if config.log_placement else "",
            picture.module_places,
        )
        return decision, picture

    def measure(self, captured: Capture, example: Example) -> Measurement:
        """Returns the costs of the operators.

        All tasks measure at the same time, though only one decides: in a step they compute at the
        same time too, and share caches and the memory's bandwidth. Measured by one task alone, the
        operators of two tasks of a host take a tenth less time than in a step.
        """
        given, targets = example.loss, example.targets
        given = copy.deepcopy(given) if isinstance(given, nn.Module) else given  # it may keep state
        loss = None if given is None else lambda outputs: scalar(given(outputs, targets))
        return measure(captured, example.args, example.kwargs, loss=loss)


def captured_graph(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, verify: bool = True
) -> Capture:
    """Returns the graph of a model, optimised."""
    captured = capture(model, args, kwargs, verify=verify)
    return optimised(captured, requested(captured.module, model))


def plain_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with contiguous tensors that are no views.

    torch.export makes the strides of such tensors, and the shape of the batch of which a
    micro-batch is a view, conditions of the graph.
    """

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().data.requires_grad_(tensor.requires_grad)

    return map_tensors(tuple(args), plain), map_tensors(dict(kwargs), plain)


def _summary(found: Placement, costs: CostGraph, pieces: int, *, free: bool) -> str:
    """Returns a sentence about a placement.

    Where operations are not `free`, each algorithm keeps to the requests, and none has everything
    on one device.
    """
    operators = [each.name for each in costs.operations if not each.stored and each.name != OUTPUT]
    counts = Counter(found.devices[name] for name in operators)
    devices = [each.device for each in found.prediction.devices]
    shares = ", ".join(f"{counts[place] or 'no'} operators on {place}" for place in devices)
    split = f", {pieces} micro-batches" if pieces > 1 else ""
    alone = [
        seconds
        for name, seconds in found.tried.items()
        if seconds is not None and name.startswith("single ") and "," not in name
    ]
    beside = ""
    if alone and free and len(devices) > 1:
        beside = f", {1e3 * min(alone):.3g} ms on one device"
    how = found.algorithm if free else "within the requests"
    return (
        f"graph: {shares}{split}; predicted {1e3 * found.prediction.step_seconds:.3g} ms a "
        f"step{beside} ({how})"
    )
