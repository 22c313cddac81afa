"""Two processes with one thread each that compute placed graphs, one placement in turn.

As a job of strategy `graph` does it: each process captures the model for itself, both measure the
operators at the same time, of which rank 0 knows the result, and both measure the link.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from benchmarks.graph_models import PLACED
from benchmarks.processes import THREADS, free_ports
from trireme.graph.capture.capture import capture
from trireme.graph.capture.source import scope
from trireme.graph.execute.cut import cut
from trireme.graph.execute.executor import Executor, Microbatch
from trireme.graph.execute.transfers import TaskDevice
from trireme.graph.measure.cost_graph import OUTPUT, cost_graph, grouping
from trireme.graph.measure.links import measure_links
from trireme.graph.measure.measurement import measure
from trireme.graph.measure.updates import state_factor, update_seconds
from trireme.graph.place.costs import Constraints, CostGraph, Device, Hardware
from trireme.graph.place.requests import matched, resolve
from trireme.launch.process_setup.resources import keep_freed_memory

TASKS = 2
SECONDS = 120.0
"""How long an answer may take."""


@dataclass(frozen=True)
class Step:
    """One training step.

    Attributes:
        seconds: how long it took.
        processor_seconds: what each process used of the processors meanwhile.
        waited_seconds: how long the main thread of each process was ready to run, and other
            processes had the processors.
    """

    seconds: float
    processor_seconds: tuple[float, ...]
    waited_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """What the processes know of a model.

    Attributes:
        costs: the costs of its operations for one micro-batch, by the number of micro-batches.
        hardware: the devices and the links.
        constraints: what every placement must respect.
        expert: the device of each operation, by hand.
        modules: the name of the module to which each operator belongs.
    """

    costs: Mapping[int, CostGraph]
    hardware: Hardware
    constraints: Constraints
    expert: Mapping[str, str]
    modules: Mapping[str, str]


class Pair:
    """The processes, for one model. They end with the context.

    Args:
        model: the name of the model, one of `PLACED`.
        pieces: the numbers of micro-batches that are measured.
    """

    def __init__(self, model: str, pieces: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        (port,) = free_ports(1)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        before = dict(os.environ)
        os.environ.update(THREADS)
        keep_freed_memory(os.environ)  # as `trireme run` starts its tasks
        try:
            for rank in range(TASKS):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, rank, port), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.measured: Measured = self._call("prepare", model, tuple(pieces))[0]

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def load(self, name: str, devices: Mapping[str, str], pieces: int) -> None:
        """Has the processes cut the graph by a placement, under a name."""
        numbers = self.measured.hardware.numbers
        places = {operation: numbers[device] for operation, device in devices.items()}
        self._call("load", name, places, pieces)

    def steps(self, name: str, count: int) -> list[Step]:
        """Makes training steps by a placement.

        Raises:
            RuntimeError: a process has failed.
        """
        answers = self._call("steps", name, count)
        return [
            Step(
                parts[0][0], tuple(used for _, used, _ in parts), tuple(late for *_, late in parts)
            )
            for parts in zip(*answers, strict=True)
        ]

    def _call(self, what: str, *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((what, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(SECONDS):
                raise RuntimeError(f"rank {rank} said nothing for {SECONDS:.0f} s")
            try:
                good, answer = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} is gone") from None
            if not good:
                raise RuntimeError(f"rank {rank}: {answer}")
            answers.append(answer)
        return answers


def _serve(pipe: Connection, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    meet = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=TASKS)
    task = _Task(rank)
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(task, what)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class _Task:
    """One process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._loaded: dict[str, tuple[Executor, torch.optim.Optimizer | None, int]] = {}

    def prepare(self, name: str, pieces: Sequence[int]) -> Measured | None:
        torch.manual_seed(0)
        self._branched = PLACED[name]
        model = self._branched.make()
        self._args, self._targets = self._branched.batch()
        captured = capture(model, self._args, {})
        self._module = captured.module
        ranks = list(range(TASKS))
        links = measure_links(ranks)
        measured = {}
        for count in pieces:
            args, targets = self._pieces(count)[0]
            measured[count] = measure(captured, args, loss=partial(self._mean, targets))
        if self._rank:  # it has measured, as ranks compute at the same time in a step, too
            return None
        names = [f"worker:{rank}/cpu" for rank in ranks]
        hardware = Hardware(
            tuple(map(Device, names)),
            links={(names[one], names[other]): link for (one, other), link in links.items()},
        )
        optimizer = _optimizer(list(model.parameters()))
        costs = {
            count: cost_graph(
                captured,
                each,
                state_factor=state_factor(optimizer),
                update_seconds=update_seconds(optimizer),
            )
            for count, each in measured.items()
        }
        constraints = grouping(captured)
        wanted = resolve(
            matched(self._module.graph, self._branched.expert),
            constraints.together,
            list(costs[pieces[0]].positions),
            names,
        ).constraints.pinned
        # The loss is where most of the outputs are computed.
        last = self._module.graph.output_node().all_input_nodes[0].name
        nodes = [node for node in self._module.graph.nodes if node.op == "call_function"]
        modules = {node.name: scope(node) for node in nodes}
        expert = {**wanted, OUTPUT: wanted[last]}
        return Measured(costs, hardware, constraints, expert, modules)

    def _mean(self, targets: torch.Tensor, outputs: Any) -> torch.Tensor:
        return self._branched.loss(outputs, targets)

    def _pieces(self, count: int) -> list[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
        args = zip(*(each.chunk(count) for each in self._args), strict=True)
        return list(zip(args, self._targets.chunk(count), strict=True))

    def load(self, name: str, places: Mapping[str, int], pieces: int) -> None:
        parts = cut(self._module, places, output_place=places[OUTPUT])
        at = [TaskDevice(rank, torch.device("cpu")) for rank in range(TASKS)]
        executor = Executor(parts, self._rank, at)
        graph = self._module.graph
        mine = [
            self._module.get_parameter(str(node.target))
            for node in graph.find_nodes(op="get_attr")
            if places.get(node.name) == self._rank
            and dict(self._module.named_parameters()).get(str(node.target)) is not None
        ]
        self._loaded[name] = executor, _optimizer(mine) if mine else None, pieces

    def steps(self, name: str, count: int) -> list[tuple[float, float, float]]:
        executor, optimizer, pieces = self._loaded[name]
        steps = []
        for _ in range(count):
            dist.barrier()
            began, used, late = time.perf_counter(), time.process_time(), _waited_seconds()
            microbatches = [
                Microbatch(list(tree_leaves((args, {}))), partial(self._share, targets, pieces))
                for args, targets in self._pieces(pieces)
            ]
            executor.run(microbatches)
            loss = torch.zeros(())
            for each in microbatches:
                loss += 0 if each.value is None else each.value
            dist.all_reduce(loss)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            used, late = time.process_time() - used, _waited_seconds() - late
            dist.barrier()
            steps.append((time.perf_counter() - began, used, late))
        return steps

    def _share(self, targets: torch.Tensor, pieces: int, outputs: Any) -> torch.Tensor:
        return self._branched.loss(outputs, targets) / pieces


def _optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.001)


def _waited_seconds() -> float:
    """Returns how long this thread has been ready to run without running (Linux)."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) * 1e-9
