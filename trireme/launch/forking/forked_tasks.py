"""Forks the tasks of one job from their template, and says so where that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.forking.fork_request import ERROR, OUTPUT, ForkRequest
from trireme.launch.forking.template import TaskTemplate
from trireme.launch.process import ForkedProcess
from trireme.launch.process_setup.blas import BLAS_VARIABLE


class ForkedTasks:
    """The template of one job, from its start on. Close it at the end."""

    def __init__(
        self,
        environ: Mapping[str, str],
        path: Path,
        directory: Path | None,
        say: Callable[[str], object],
    ) -> None:
        self._say = say
        # A BLAS that starts threads when it is loaded waits until a task has been forked.
        self._own = {BLAS_VARIABLE: environ[BLAS_VARIABLE]} if BLAS_VARIABLE in environ else {}
        self._template = TaskTemplate({**environ, BLAS_VARIABLE: "1"}, path, directory)

    @property
    def pid(self) -> int:
        """The process id of the template."""
        return self._template.pid

    @property
    def ready(self) -> bool:
        """Whether tasks can be forked now."""
        return self._template.ready

    @property
    def gone(self) -> bool:
        """Whether tasks cannot be forked any more."""
        return bool(self._template.trouble)

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when `look` has something to do."""
        return self._template.fileno()

    def look(self) -> None:
        """Takes in what the template has said, without waiting."""
        self._template.look()
        self._tell()

    def fork(
        self, config: TaskConfig, command: Sequence[str], output: int, error: int
    ) -> ForkedProcess | None:
        """Forks a task that is as if it had been started with a command line."""
        if not self.ready:
            return None
        inherited = config.descriptors
        pid = self._template.fork(
            ForkRequest(
                arguments=tuple(command),
                environ={**self._own, TASK_VARIABLE: encode_task(config)},
                descriptors=(OUTPUT, ERROR, *inherited),
            ),
            [output, error, *inherited.values()],
        )
        self._tell()
        return None if pid is None else ForkedProcess(pid)

    def close(self) -> None:
        """Ends the template's process. May be repeated."""
        self._template.close()

    def _tell(self) -> None:
        if self.gone:
            self._say(
                "WARNING: each task imports PyTorch by itself from now on, which takes longer: "
                f"the process that tasks are forked from (pid {self.pid}) is of no use, because "
                f"{self._template.trouble}"
            )
