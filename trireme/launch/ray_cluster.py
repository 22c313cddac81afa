"""Seats for a job's tasks on a Ray cluster: placement groups, and an agent in each seat.

The one place that imports Ray, and it does so when it is first used: everything else works
without it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from trireme.errors import ConfigurationError, WaitTimeout
from trireme.launch.agent import NodeFacts, TaskAgent
from trireme.launch.placement import Seat, Wishes, plan

__all__ = [
    "Agent",
    "NodeAgent",
    "RayCluster",
    "first_line",
    "load_ray",
    "look_around",
    "seated",
]

SHARE = 0.01
"""Of a bundle's core that an agent formally takes. Its bundle is what is kept for the task; an
actor that asks for nothing would not be put into the bundle."""

CALLS = 4
"""How many calls an agent answers at the same time: one that waits for news, and orders."""

NODE_DIGITS = 8
"""Of a node's id, enough to tell nodes apart."""

SAY_EVERY = 5.0
KNOCK_TIMEOUT = 10.0


def load_ray() -> Any:
    """Returns the package `ray`.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise ConfigurationError(
            f"--on ray needs Ray, and it cannot be imported ({error}): pip install 'ray>=2.40', "
            "here and on every node"
        ) from error
    return ray


def first_line(error: BaseException) -> str:
    """Returns what an error of Ray's says, in one line: what was raised on the node comes last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (raised[-1] if raised else lines[0]) if lines else type(error).__name__


class NodeAgent(TaskAgent):
    """A `TaskAgent` that is an actor of Ray's."""

    def look_around(self, directory: str, script: str) -> NodeFacts:
        """Returns what this node is, and whether a task can run here; see `look`."""
        ray = load_ray()
        node = ray.get_runtime_context().get_node_id()[:NODE_DIGITS]
        return self.look(node, ray.util.get_node_ip_address(), directory, script)


class Agent:
    """A `NodeAgent` on a node of the cluster. Every call returns at once, with a future."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, method: str, *arguments: object) -> Future[Any]:
        """Calls a method of the agent."""
        future: Future[Any] = getattr(self._actor, method).remote(*arguments).future()
        return future

    def tell(self, method: str, *arguments: object) -> None:
        """Calls a method whose answer nobody needs."""
        getattr(self._actor, method).remote(*arguments)

    def is_loss(self, error: BaseException) -> bool:
        """Whether a call failed because the agent is gone, and not only what it was told to do."""
        return isinstance(error, load_ray().exceptions.RayActorError)

    def end(self) -> None:
        """Ends the agent at once; its task ends with it."""
        with contextlib.suppress(Exception):  # it has ended already, or the cluster has
            load_ray().kill(self._actor)


class RayCluster:
    """The seats of one job, held until it ends; `seated` makes it."""

    def __init__(self, groups: Mapping[str, Any], seats: Mapping[str, Seat]) -> None:
        self._groups = groups
        self._seats = seats

    @property
    def names(self) -> tuple[str, ...]:
        """Every task that has a seat."""
        return tuple(self._seats)

    def hire(self, name: str) -> Agent:
        """Starts an agent in the seat of a task, on whatever node that is now."""
        ray = load_ray()
        seat = self._seats[name]
        options = {
            "num_cpus": SHARE,
            "num_gpus": seat.gpus,
            "max_concurrency": CALLS,
            "max_restarts": 0,
            "scheduling_strategy": ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._groups[seat.group],
                placement_group_bundle_index=seat.index,
            ),
        }
        return Agent(ray.remote(NodeAgent).options(**options).remote(name))


@contextlib.contextmanager
def seated(
    address: str, wishes: Wishes, timeout: float, say: Callable[[str], None]
) -> Iterator[RayCluster]:
    """Joins a Ray cluster and holds the seats of a job there while the block runs.

    Args:
        address: of the cluster's head, `host:port`; `auto` finds the one of this host.
        wishes: what the job asks for.
        timeout: seconds until the cluster must have given it.
        say: takes a line for the user, every few seconds of waiting.

    Raises:
        ConfigurationError: there is no such cluster.
        WaitTimeout: the cluster had no room in time.
    """
    ray = load_ray()
    _join(ray, address)
    held: dict[str, Any] = {}
    try:
        groups, seats = plan(wishes)
        for name, group in groups.items():
            held[name] = ray.util.placement_group(list(group.bundles), strategy=group.strategy)
        _wait_for_room(ray, list(held.values()), wishes, timeout, say)
        yield RayCluster(held, seats)
    finally:
        for group in held.values():
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.util.remove_placement_group(group)
        ray.shutdown()


def look_around(
    agents: Mapping[str, Agent], directory: str, script: str, timeout: float
) -> dict[str, NodeFacts]:
    """Returns what each agent finds on its node.

    Raises:
        ConfigurationError: an agent could not start, or did not answer in time.
    """
    deadline = time.monotonic() + timeout
    asked = {name: agent.call("look_around", directory, script) for name, agent in agents.items()}
    found = {}
    for name, future in asked.items():
        try:
            found[name] = future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise WaitTimeout(
                f"the Ray cluster started no process for {name} within {timeout:.0f} s: "
                "`ray status` shows its nodes"
            ) from error
        except load_ray().exceptions.RayError as error:
            raise ConfigurationError(
                f"{name} cannot run on the node that Ray gave it: {first_line(error)}. Every node "
                "needs trireme[ray] in the Python that Ray runs there"
            ) from error
    return found


def _join(ray: Any, address: str) -> None:
    if address.startswith("ray://"):
        raise ConfigurationError(
            f"--ray-address {address} is for Ray's client: give the address of the cluster's head "
            "as host:port, from a host that is a node of it"
        )
    _knock(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise _nobody_there(address, error) from error


def _knock(address: str) -> None:
    """Sees that something listens where the head should: Ray itself would try for minutes.

    Raises:
        ConfigurationError: nothing does.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_TIMEOUT).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _nobody_there(address, error) from error


def _nobody_there(address: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"no Ray cluster is joined at --ray-address {address}: {first_line(error)}. "
        "`ray start --head` makes one of this host, `ray start --address HOST:PORT` adds a "
        "node to it; the launcher has to be on one of its nodes"
    )


def _wait_for_room(
    ray: Any, groups: Sequence[Any], wishes: Wishes, timeout: float, say: Callable[[str], None]
) -> None:
    begin = time.monotonic()
    said = begin
    for group in groups:
        while not group.wait(timeout_seconds=1):  # not longer: a signal is heard in between
            now = time.monotonic()
            if now > begin + timeout:
                raise WaitTimeout(
                    f"the Ray cluster had no room within {timeout:.0f} s: {_wanted(ray, wishes)}. "
                    "Ask for less, or add nodes with `ray start`"
                )
            if now > said + SAY_EVERY:
                said = now
                say(f"waiting for room on the Ray cluster: {_wanted(ray, wishes)}")


def _wanted(ray: Any, wishes: Wishes) -> str:
    has, free = ray.cluster_resources(), ray.available_resources()
    processes = wishes.workers * wishes.processes
    cores = wishes.servers + processes * wishes.cpus
    wanted = f"{cores} cores"
    there = f"{has.get('CPU', 0):g} cores ({free.get('CPU', 0):g} free)"
    if wishes.gpus:
        wanted += f" and {processes * wishes.gpus:g} GPUs"
        there += f" and {has.get('GPU', 0):g} GPUs ({free.get('GPU', 0):g} free)"
    largest = f", {wishes.cpus} cores" + (f" and {wishes.gpus:g} GPUs" if wishes.gpus else "")
    return f"the job asks for {wanted}{largest} of them on one node; the cluster has {there}"
