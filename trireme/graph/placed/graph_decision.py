"""Decides where the operations of a captured model are computed: one process does for all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

import msgspec
import torch
from torch import fx, nn

from trireme.graph.capture.capture import Capture, capture
from trireme.graph.capture.effects import written
from trireme.graph.capture.optimise import Optimised, optimise
from trireme.graph.capture.scopes import requested
from trireme.graph.config import GraphConfig
from trireme.graph.drawing.assembly import picture_of
from trireme.graph.drawing.modules import module_places
from trireme.graph.drawing.picture import Picture
from trireme.graph.drawing.text import placement_table
from trireme.graph.execute.cut import Cut, cut
from trireme.graph.measure.cost_graph import OUTPUT, cost_graph, grouping
from trireme.graph.measure.measurement import Measurement, measure
from trireme.graph.measure.updates import NO_UPDATE, UpdateCost, state_factor, update_cost
from trireme.graph.place.costs import CostGraph, Hardware
from trireme.graph.place.placement import Placement, place
from trireme.graph.place.requests import Requests, barred_devices, matched, named_by, resolve
from trireme.ps.joint_optimizer import members
from trireme.tensors import map_tensors


@dataclass(frozen=True, eq=False)
class Example:
    """A call of the model, whose duration is measured."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], torch.Tensor] | None = None  # outputs -> the mean loss, where known


class Decision(msgspec.Struct, frozen=True):
    """Where each operation is computed: what one process tells the others."""

    placement: dict[str, int] = {}  # the place of each operation, parameter and buffer, by node
    output: int = 0  # the place that receives the model's outputs
    pieces: int = 1  # the number of micro-batches
    summary: str = ""  # what was decided and why, in a sentence
    warnings: tuple[str, ...] = ()  # requests of the program that cannot be met
    table: str = ""  # the placement as a table
    modules: dict[str, str] = {}  # the name of the place of most operations of each module
    error: str = ""  # why there is no placement; "" if there is one


@dataclass(frozen=True, eq=False)
class Placed:
    """A placement, and what it was made of."""

    optimised: Optimised
    costs: CostGraph
    hardware: Hardware
    placement: Placement
    pieces: int  # the number of micro-batches
    requests: Requests

    @property
    def decision(self) -> Decision:
        """What other processes need to know of it."""
        numbers, picture = self.hardware.numbers, self.picture()
        placement = {name: numbers[device] for name, device in self.placement.devices.items()}
        return Decision(
            placement,
            placement[OUTPUT],
            self.pieces,
            _summary(self, picture),
            self.requests.unmet,
            placement_table(picture),
            module_places(picture.nodes),
        )

    def cut(self) -> Cut:
        """Returns the graph, cut by the placement."""
        decision = self.decision
        module = self.optimised.capture.module
        return cut(module, decision.placement, output_place=decision.output)

    def picture(self, captured: Capture | None = None, parts: Cut | None = None) -> Picture:
        """Returns what is to be shown of it."""
        return picture_of(
            self.optimised,
            self.placement,
            self.costs,
            self.hardware,
            captured=captured,
            cut=parts,
            micro_batches=self.pieces,
        )


@dataclass(frozen=True)
class Decider:
    """Measures the operations of a captured model, and places them."""

    config: GraphConfig  # what the program and the launch request
    state_factor: float = 0.0  # the bytes of optimizer state for each byte of parameters
    update: UpdateCost = NO_UPDATE  # how long the optimizer takes for a parameter
    servers: int = 0  # the number of parameter servers
    warning: str = ""  # what a user should know of the optimizer; "" if nothing

    @classmethod
    def of(cls, config: GraphConfig, optimizer: torch.optim.Optimizer, servers: int) -> Self:
        """Returns one for a program's optimizer, or several, of which the largest costs count."""
        each = members(optimizer)
        update = NO_UPDATE
        if not servers:
            costs = [update_cost(one) for one in each]
            update = UpdateCost(
                max(cost.tensor_seconds for cost in costs), max(cost.byte_seconds for cost in costs)
            )
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
        optimised: Optimised,
        model: nn.Module,
        example: Callable[[int], Example],
        *,
        divides: Callable[[int], bool],
        hardware: Hardware,
        homes: Mapping[str, str],
    ) -> Placed:
        """Returns where each operation is computed, and why."""
        captured, config = optimised.capture, self.config
        module, graph = captured.module, captured.module.graph
        wanted = {**matched(graph, config.placement), **requested(module, model), **homes}
        names = {node.name: str(node.target) for node in graph.find_nodes(op="get_attr")}
        parameters = frozenset(
            node
            for node, name in names.items()
            if isinstance(attrgetter(name)(module), nn.Parameter)
        )
        groups = grouping(captured, parameters & wanted.keys()).together
        groups += tuple(
            tuple(name for pattern in patterns for name in named_by(graph, pattern))
            for patterns in config.together
        )
        barred = barred_devices(graph, config.never)
        best: Placed | None = None
        measured = self.measure(captured, example, len(hardware.devices), divides)
        for pieces, each in measured.items():
            costs = cost_graph(captured, each, state_factor=self.state_factor, update=self.update)
            requests = resolve(
                wanted,
                groups,
                list(costs.positions),
                list(hardware.numbers),
                parameters=parameters,
                devices=config.devices,
                barred=barred,
                servers=self.servers,
                soft=config.soft,
                names=names,
            )
            found = place(
                costs,
                hardware,
                requests.constraints,
                micro_batches=pieces,
                algorithm=config.algorithm,  # type: ignore[arg-type]
                schedule=config.schedule,
            )
            before = best.placement.prediction.step_seconds if best else math.inf
            if found.prediction.step_seconds < before:
                best = Placed(optimised, costs, hardware, found, pieces, requests)
        assert best is not None
        return best

    def measure(
        self,
        captured: Capture,
        example: Callable[[int], Example],
        places: int,
        divides: Callable[[int], bool],
    ) -> dict[int, Measurement]:
        """Returns the costs of the operators, by the numbers of micro-batches to compare.

        All tasks measure at the same time, though only one decides: in a step they compute at the
        same time too, and share caches and the memory's bandwidth. Measured by one task alone, the
        operators of two tasks of a host take a tenth less time than in a step.
        """
        measured = {}
        for pieces in self._candidates(captured, places, divides):
            piece = example(pieces)
            measured[pieces] = measure(captured, piece.args, piece.kwargs, loss=piece.loss)
        return measured

    def _candidates(
        self, captured: Capture, places: int, divides: Callable[[int], bool]
    ) -> list[int]:
        size = captured.batch.size if captured.batch.dynamic else None
        if self.config.microbatches is not None:
            return [self.config.microbatches]
        if size is None or places == 1 or keeps_statistics(captured.module):
            return [1]
        several = min(size, 2 * places)
        return [1, several] if several > 1 and divides(several) else [1]


def optimised_graph(
    model: nn.Module, batch: Example, *, verify: bool = True
) -> tuple[Capture, Optimised]:
    """Returns the graph of a model as captured, and optimised."""
    args, kwargs = plain_inputs(batch.args, batch.kwargs)
    captured = capture(model, args, kwargs, verify=verify)
    return captured, optimise(captured, devices=requested(captured.module, model))


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


def keeps_statistics(module: fx.GraphModule) -> bool:
    """Returns whether a graph changes buffers, as batch norm does with statistics of a batch."""
    buffers = {id(buffer) for buffer in module.buffers()}
    return any(
        each.op == "get_attr" and id(attrgetter(str(each.target))(module)) in buffers
        for node in module.graph.nodes
        for each in written(node)
    )


def _summary(placed: Placed, picture: Picture) -> str:
    """Returns a sentence about a placement, with the operators that its table counts."""
    found, pieces = placed.placement, placed.pieces
    # Else each algorithm keeps to the requests, and none has everything on one device.
    free = not placed.requests.constraints.pinned
    counts = Counter(node.place for node in picture.nodes if node.is_operator and node.place)
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
