"""A model as a dataflow graph: the operations and the parameters that one process holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from operator import attrgetter
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from trireme.errors import ConfigurationError
from trireme.graph.capture.capture import Capture
from trireme.graph.capture.scopes import requested
from trireme.graph.config import GraphConfig
from trireme.graph.execute.cut import cut, fingerprint
from trireme.graph.execute.executor import Executor
from trireme.graph.execute.transfers import TaskDevice
from trireme.graph.measure.links import measure_links
from trireme.graph.place.costs import Device, Hardware
from trireme.graph.placed.decision import Decider, Decision, Example, captured_graph, plain_inputs
from trireme.parallel.config import PipelineConfig
from trireme.parallel.deferred import Deferred, with_untouched_memory
from trireme.parallel.model_part import MeshPart
from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.session.model.module_names import named_buffers, named_parameters


@dataclass(frozen=True, eq=False)
class PlacedGraph:
    """The graph of a model in one mode, ready to compute."""

    captured: Capture
    decision: Decision  # where each operation is computed
    executor: Executor  # computes this process's operations

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the arguments of a call as the graph takes them, flat."""
        plain, named = plain_inputs(args, kwargs)
        try:
            return self.captured.check(*plain, **named)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error}. The model was captured by GraphConfig(example=...), else by the first "
                "batch: all batches must be like it, but for the number of examples"
            ) from error


class GraphPart(MeshPart):
    """The operations of a model that one process computes, with their parameters.

    The model is captured and placed by the first batch. Until then the process has all parameters,
    and afterwards those of its operations. When the program freezes or unfreezes parameters of
    `model`, or changes the mode of its layers, it is captured again; parameters stay where they
    are in the first graph.
    """

    def __init__(
        self,
        process_group: TorchProcessGroup,
        model: nn.Module,
        config: GraphConfig,
        decider: Decider,
        deferred: Deferred | None = None,
    ) -> None:
        cut = None if deferred is None else deferred.model
        super().__init__(process_group, model, PipelineConfig(), None, cut=cut)
        self._known = dict(named_parameters(model))
        self._thawed = {name: known.requires_grad for name, known in self._known.items()}
        self.lean = deferred is not None
        self._deferred = deferred
        self._unsaid: list[Decision] = []
        self.microbatches = config.pieces
        self._config = config
        self._decider = decider
        self._group = process_group.group("graph")
        self._ranks = dist.get_process_group_ranks(self._group)
        self._tasks: tuple[int, ...] = ()  # the task of each place
        self._places: tuple[TaskDevice, ...] = ()
        self._layers = tuple(zip(model.modules(), self.modules[0].modules(), strict=True))
        self._graphs: dict[tuple[bool, ...], PlacedGraph] = {}
        self._homes: dict[str, int] = {}
        self._every = dict(self.parameters)
        self._buffers: frozenset[str] | None = None

    @property
    def buffer_names(self) -> frozenset[str]:
        return super().buffer_names if self._buffers is None else self._buffers

    def graph(self, example: Example, *, early: bool = False) -> PlacedGraph:
        """Returns the graph of the model's present mode; made `early`, it is shown later."""
        trained = (known.requires_grad for known in self._known.values())
        mode = (*(module.training for module in self.modules[0].modules()), *trained)
        if mode not in self._graphs:
            self._graphs[mode] = self._placed(example)
        if not early:
            self._announce()
        return self._graphs[mode]

    def zero_gradients(self) -> None:
        """As `MeshPart.zero_gradients`; all processes follow changes of any parameter.

        They follow the modes of the layers of `model` too, training or evaluation.
        """
        for theirs, mine in self._layers:
            mine.training = theirs.training
        own = self.parameters
        self.parameters = self._every
        super().zero_gradients()
        self.parameters = own
        for name, parameter in own.items():
            if parameter.requires_grad and not self._known[name].requires_grad:
                raise ConfigurationError(
                    f"{name} was unfrozen in this process alone: with a graph, unfreeze parameters "
                    "of session.model, in every process"
                )

    def _placed(self, example: Example) -> PlacedGraph:
        self.say("graph: capturing, measuring and placing the model")
        inputs = plain_inputs(example.args, example.kwargs)
        with with_untouched_memory(self.modules[0]):
            captured = captured_graph(self.modules[0], *inputs, verify=not self.lean)
        if not self._places:
            self._find_places(captured)
        decision = self._decided(captured, example)
        self.process_group.output_part = self._ranks.index(self._places[decision.output].rank)
        parts = cut(captured.module, decision.placement, output_place=decision.output)
        mine = fingerprint(parts)
        for rank, other in enumerate(self.process_group.exchange(mine.encode())):
            if other.decode() != mine:
                raise ConfigurationError(
                    f"rank {rank} and rank {self.process_group.rank} captured different graphs of "
                    "the model: the Python code of forward must not depend on the rank, on random "
                    "numbers, or on the values of the batch"
                )
        if not self._homes:
            self._keep_own(captured, decision)
        executor = Executor(parts, self.process_group.rank, self._places, self._group)
        return PlacedGraph(captured, decision, executor)

    @property
    def _place_names(self) -> tuple[str, ...]:
        places = zip(self._tasks, self._places, strict=True)
        return tuple(f"worker:{task}/{place.device}" for task, place in places)

    def _find_places(self, captured: Capture) -> None:
        """Finds the devices of this replica: one of each task, and others that are requested."""
        own = f"{self.device} {torch.cuda.device_count()}".encode()
        devices = [data.decode().split() for data in self.process_group.exchange(own)]
        wanted = {
            *self._config.placement.values(),
            *requested(captured.module, self.modules[0]).values(),
        }
        found = [(task, devices[rank][0]) for task, rank in enumerate(self._ranks)]
        for name in sorted(wanted):
            role, _, device = name.partition("/")
            task = int(role.rpartition(":")[2])
            if not device or task >= len(self._ranks) or (task, device) in found:
                continue
            kind, _, number = device.partition(":")
            if kind == "cpu" or int(number) < int(devices[self._ranks[task]][1]):
                found.append((task, device))
        self._tasks = tuple(task for task, _ in found)
        self._places = tuple(
            TaskDevice(self._ranks[task], torch.device(name)) for task, name in found
        )

    def _decided(self, captured: Capture, example: Example) -> Decision:
        """Returns the decision of rank 0, in every process."""
        group, data = self.process_group, None
        hardware = self._hardware()
        if group.is_chief:
            homes = self._requested_homes(captured)
            try:
                decision, _ = self._decider.decide(
                    captured, self.modules[0], example, hardware=hardware, homes=homes
                )
            except ConfigurationError as error:
                decision = Decision(error=str(error))
            data = msgspec.msgpack.encode(decision)
        else:
            with suppress(ConfigurationError):  # rank 0 says it
                self._decider.measure(captured, example)
        decision = msgspec.msgpack.decode(group.broadcast(data), type=Decision)
        if decision.error:
            raise ConfigurationError(decision.error)
        about = (self._decider.warning,) if self._decider.warning and not self._homes else ()
        warnings = (*decision.warnings, *about)
        self._unsaid.append(msgspec.structs.replace(decision, warnings=warnings))
        return decision

    def _announce(self) -> None:
        for decision in self._unsaid:
            for warning in decision.warnings if self.process_group.is_chief else ():
                self.warn(warning)
            self.say(decision.summary)
            if decision.table:
                self.say(decision.table)
        self._unsaid.clear()

    def _hardware(self) -> Hardware:
        names = self._place_names
        limit = self._config.memory_bytes
        measured = measure_links(self._ranks, self._group) if len(self._ranks) > 1 else {}
        pairs = combinations(zip(names, self._tasks, strict=True), 2)
        links = {
            (name, other): measured[min(task, its), max(task, its)]
            for (name, task), (other, its) in pairs
            if task != its
        }
        return Hardware(tuple(Device(name, memory_bytes=limit) for name in names), links=links)

    def _requested_homes(self, captured: Capture) -> dict[str, str]:
        model = self.modules[0]
        homes = {
            id(tensor): self._homes[name]
            for name, tensor in (*named_parameters(model), *named_buffers(model))
            if name in self._homes
        }
        found = {}
        for node in captured.module.graph.find_nodes(op="get_attr"):
            home = homes.get(id(attrgetter(str(node.target))(captured.module)))
            if home is not None:
                found[node.name] = self._place_names[home]
        return found

    def _keep_own(self, captured: Capture, decision: Decision) -> None:
        """Leaves the parameters and buffers of other processes to them."""
        nodes = captured.module.graph.find_nodes(op="get_attr")
        place_of = {
            id(attrgetter(str(node.target))(captured.module)): decision.placement.get(node.name, 0)
            for node in nodes
        }
        rank = self.process_group.rank
        model = self.modules[0]
        # What the graph does not use stays with the first place.
        self._homes = {
            name: place_of.get(id(parameter), 0) for name, parameter in named_parameters(model)
        }
        mine = {name for name, place in self._homes.items() if self._places[place].rank == rank}
        for name in [name for name in self.parameters if name not in mine]:
            del self.parameters[name]
        own = {id(parameter) for parameter in self.parameters.values()}
        self.trained[:] = [each for each in self.trained if id(each) in own]
        buffers = {name: place_of.get(id(each), 0) for name, each in named_buffers(model)}
        self._buffers = frozenset(
            name for name, place in buffers.items() if self._places[place].rank == rank
        )
        if self._deferred is not None:
            self._deferred.materialise(mine)
        for name in mine:
            parameter = self.parameters[name]
            parameter.data = parameter.data.to(self._places[self._homes[name]].device)
        self._homes |= buffers
        self.on_placed()
