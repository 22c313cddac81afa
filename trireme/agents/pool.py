"""What an engine with agents asks of a cluster: agents for tasks, on nodes that have room."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from trireme.agents.agent import NodeFacts
from trireme.agents.resources import WorkerResources
from trireme.errors import ConfigurationError, WaitTimeout

NOTICE_SECONDS = 5.0


class Agent(Protocol):
    """A `TaskAgent` on a node. Every call returns at once, with a future."""

    def call(self, method: str, *arguments: object) -> Future[Any]:
        """Calls a method of the agent."""

    def is_loss(self, error: BaseException) -> bool:
        """Returns whether a call failed because the agent is gone."""

    def end(self) -> None:
        """Ends the agent at once; its task ends with it."""


class Pool(Protocol):
    """The nodes of a cluster, as far as they are for one job."""

    place: str  # such as `the Ray cluster`

    @property
    def options(self) -> WorkerResources:
        """The options of the job on its engine."""

    more_room: str  # what a user does who needs more room
    needs: str  # what a node needs so that an agent can run there

    def start_agents(self, names: Sequence[str]) -> Mapping[str, Agent]:
        """Starts tasks' agents, on the nodes that suit best, or as soon as there is room."""

    def inspect_here(self) -> NodeFacts:
        """Returns what the node of this process is."""

    def release(self, name: str) -> None:
        """Forgets where a task was, whose agent has ended."""

    def shortage(self, names: Iterable[str]) -> str:
        """Returns what tasks ask for, and what the cluster has."""


def inspect_nodes(
    pool: Pool, agents: Mapping[str, Agent], timeout: float, say: Callable[[str], None]
) -> dict[str, NodeFacts]:
    """Returns what each agent has found on its node, once there is room for all."""
    began = noticed = time.monotonic()
    asked = {name: agent.call("inspect_node") for name, agent in agents.items()}
    found: dict[str, NodeFacts] = {}
    while len(found) < len(asked):
        name = next(name for name in asked if name not in found)
        with contextlib.suppress(TimeoutError):
            try:
                found[name] = asked[name].result(1.0)  # not longer, to handle signals
            except TimeoutError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"{name} cannot run on its node of {pool.place}: {first_line(error)}. Every "
                    f"node needs {pool.needs}"
                ) from error
            continue
        now = time.monotonic()
        if now > began + timeout:
            raise WaitTimeout(
                f"{pool.place} had no room within {timeout:.0f} s: the job asks for "
                f"{pool.shortage(agents)}. Ask for less, or {pool.more_room}"
            )
        if now > noticed + NOTICE_SECONDS:
            noticed = now
            say(f"waiting for room on {pool.place}: the job asks for {pool.shortage(agents)}")
    return found


def first_line(error: BaseException) -> str:
    """Returns an error of an agent in one line: the last exception, as it was raised there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (raised[-1] if raised else lines[0]) if lines else type(error).__name__
