"""The agent of one task in a step of Slurm, which a launcher speaks with through `srun`.

    python -m trireme.slurm.step TASK ADDRESS PROGRAM [ARGS...]

Requests come on standard input, and answers go to standard output, as Slurm passes output on by
lines. The agent, and with it the task, ends with standard input.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import BinaryIO

from trireme.agents.agent import NodeFacts, TaskAgent
from trireme.agents.calls import AT_A_TIME, answer


class StepAgent(TaskAgent):
    """A `TaskAgent` in a step of Slurm."""

    def __init__(self, name: str, address: str, program: Sequence[str]) -> None:
        super().__init__(name, program, os.getcwd())
        self._address = address

    def inspect_node(self) -> NodeFacts:
        """Returns what this node is, and whether a task can run here."""
        return self.inspect(os.environ.get("SLURMD_NODENAME", ""), self._address)

    def launcher_address(self) -> str:
        """Returns the address of the node on which `srun` runs."""
        return os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")


def serve(agent: StepAgent, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers requests until there are no more, and then ends the task."""
    lock = Lock()

    def answer_one(line: bytes) -> None:
        found = answer(agent, line)
        with lock:
            answers.write(found)
            answers.flush()

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        try:
            for line in requests:
                pool.submit(answer_one, line)
        finally:
            agent.shut_down()


def main(arguments: Sequence[str]) -> None:
    """Runs the agent of the task, address and program of the arguments."""
    name, address, *program = arguments
    agent = StepAgent(name, address, program)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else is printed here must not come between answers
    # Slurm asks all steps of a job to end: the task, not the agent, has something to save.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: agent.pass_on(signal.Signals(number)))
    serve(agent, sys.stdin.buffer, answers)
    os._exit(0)  # not after threads that wait for what will not come


if __name__ == "__main__":
    main(sys.argv[1:])
