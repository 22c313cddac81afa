"""Starts the agents of a job's tasks as steps in an allocation of Slurm."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from trireme.agents.agent import NodeFacts, TaskAgent
from trireme.agents.calls import AgentLostError, Calls
from trireme.agents.engine import run_on_agents
from trireme.agents.resources import amounts, choose_nodes, resources_of, total, wanted
from trireme.errors import ConfigurationError
from trireme.launch.engines import engine_options
from trireme.launch.launcher import Job
from trireme.launch.output import Console
from trireme.launch.run_directory import RunDirectory
from trireme.slurm.allocation import Allocation, read_allocation, usable
from trireme.slurm.options import SlurmOptions

ANSWER_SECONDS = 30.0
COMMAND_SECONDS = 30.0
_KEPT_LINES = 20  # of what `srun` says


class SrunAgent:
    """A `StepAgent` in a step that `srun` has started, and keeps a connection with."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher, which tells the agents
        )
        self._calls = Calls(self._send)
        self.call = self._calls.call
        self._said = deque[str](maxlen=_KEPT_LINES)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        self._listener.start()

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None  # it is a pipe
        with contextlib.suppress(OSError, ValueError):  # the listener says why
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, AgentLostError)

    def end(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()  # at which the agent ends
        self._process.terminate()  # and the step, where it waits for room

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._calls.take(line)
        status = self._process.wait()
        self._errors.join()
        said = next(iter(reversed(self._said)), f"srun ended with status {status}")
        self._calls.lose(said)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.decode("utf-8", "replace").strip())


class SlurmPool:
    """The nodes of an allocation. Each task is a step of its own; the coordinator is here."""

    place = "the allocation"
    more_room = "ask Slurm for a larger allocation"
    needs = "the same Python and program at the same paths, as on a shared file system"

    def __init__(self, job: Job, allocation: Allocation) -> None:
        self._job = job
        self._allocation = allocation
        self.options = engine_options(job.task.config, SlurmOptions)
        self._nodes: dict[str, str] = {}  # of each task
        self._agents: dict[str, SrunAgent] = {}
        every = {**allocation.servers.nodes, **allocation.workers.nodes}
        self._addresses = {name: _address_of(name) for name in every}

    def start_agents(self, names: Sequence[str]) -> Mapping[str, SrunAgent]:
        there = usable(_states(self._addresses))
        for name in names:
            self._check_size(name)
            free = {node: has for node, has in self._free(name).items() if node in there}
            self._nodes |= choose_nodes([name], self.options, free, self._nodes)
            self._agents[name] = SrunAgent(self._command(name))
        return {name: self._agents[name] for name in names}

    def _check_size(self, name: str) -> None:
        """Refuses a task for which no node is large enough, also when all is free."""
        needs, nodes = resources_of(name, self.options), self._allocation.group(name).nodes.values()
        if not any(all(has.get(k, 0) >= needs[k] for k in needs) for has in nodes):
            raise ConfigurationError(
                f"{name} asks for {amounts(needs)}, and the nodes of the allocation have at most "
                f"{amounts(max(nodes, key=lambda has: has['CPU']))} each: give salloc or sbatch "
                "--cpus-per-task, --gpus-per-node, or --exclusive"
            )

    def _free(self, name: str) -> Mapping[str, dict[str, float]]:
        """Returns what the nodes of a task's role have left."""
        left = {node: dict(has) for node, has in self._allocation.group(name).nodes.items()}
        for task, node in self._nodes.items():
            for kind, amount in resources_of(task, self.options).items() if node in left else ():
                left[node][kind] -= amount
        return left

    def _command(self, name: str) -> list[str]:
        """Returns the command that starts an agent; without a node Slurm waits for room."""
        needs, group = resources_of(name, self.options), self._allocation.group(name).number
        node = self._nodes.get(name)
        return [
            *("srun", f"--jobid={self._allocation.job}", f"--job-name={name}", "--mpi=none"),
            *(() if group is None else (f"--het-group={group}",)),
            *("--nodes=1", "--ntasks=1", "--exact", "--mem=0", "--no-kill"),
            f"--cpus-per-task={needs['CPU']:.0f}",
            *((f"--gpus={needs['GPU']:.0f}",) if "GPU" in needs else ()),
            *(() if node is None else (f"--nodelist={node}",)),
            *(sys.executable, "-m", "trireme.slurm.step", name),
            *(self._addresses.get(node or "", ""), *self._job.program),
        ]

    def inspect_here(self) -> NodeFacts:
        asked = next(iter(self._agents.values())).call("launcher_address")
        address = asked.result(ANSWER_SECONDS) or socket.gethostname()
        return TaskAgent("launcher", self._job.program, os.getcwd()).inspect(
            os.environ.get("SLURMD_NODENAME") or socket.gethostname(), address
        )

    def release(self, name: str) -> None:
        self._nodes.pop(name, None)

    def shortage(self, names: Iterable[str]) -> str:
        names = [*names]
        has = total(self._allocation.group(names[0]).nodes.values())
        free = total(self._free(names[0]).values())
        return f"{wanted(names, self.options)}; it has {amounts(has)} ({free['CPU']:g} free)"


def run_slurm(job: Job, directory: RunDirectory, console: Console) -> int:
    """Runs a job to its end and returns its exit status, as `run_local` does."""

    def expand(nodes: str) -> list[str]:
        return _output("scontrol", "show", "hostnames", nodes).split()

    pool = SlurmPool(job, read_allocation(os.environ, expand))
    return run_on_agents(job, directory, console, pool)


def _address_of(node: str) -> str:
    """Returns the address at which the other nodes reach a node."""
    words = _output("scontrol", "show", "node", node, "--oneliner").split()
    name = next((w.partition("=")[2] for w in words if w.startswith("NodeAddr=")), node)
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    return name


def _states(nodes: Iterable[str]) -> dict[str, str]:
    lines = _output("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "-o", "%N %T")
    return dict(line.split(maxsplit=1) for line in lines.splitlines() if " " in line.strip())


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(
            f"--on slurm: `{' '.join(command[:3])}` does not work here: {error}. Start "
            "`trireme run` where Slurm's commands are, in an allocation"
        ) from error
    if done.returncode:
        raise ConfigurationError(f"--on slurm: {done.stderr.strip() or ' '.join(command)}")
    return done.stdout
