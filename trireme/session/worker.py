"""One worker of a job: its life, its training and its saving, put together."""

from __future__ import annotations

from trireme.errors import TriremeError
from trireme.launch.environment.detect import TaskConfig
from trireme.session.backends.base import Backend
from trireme.session.checkpoint.storage import Storage
from trireme.session.checkpoint.worker_checkpoints import WorkerCheckpoints
from trireme.session.hyperparameters import Hyperparameters
from trireme.session.lifecycle import Lifecycle
from trireme.session.observers.progress import Progress
from trireme.session.replica.buffers import Buffers
from trireme.session.trainer import Trainer
from trireme.session.training_setup import TrainingSetup

__all__ = ["Worker"]


class Worker:
    """A worker's part in its job: connects lifecycle, training and checkpoints.

    Args:
        task: the identity of this process.
        setup: what is trained.
        progress: shows each state, and the tasks that the worker waits for.

    Attributes:
        task, setup: the arguments.
        lifecycle, storage: parts of the worker.
        backend, buffers, checkpoints, trainer: further parts, once the worker has started.

    Raises:
        ConfigurationError: a session cannot have that scheduler.
    """

    backend: Backend
    buffers: Buffers
    checkpoints: WorkerCheckpoints
    trainer: Trainer

    def __init__(self, task: TaskConfig, setup: TrainingSetup, progress: Progress) -> None:
        self.task = task
        self.setup = setup
        self.lifecycle = Lifecycle(task, setup, progress)
        self.storage = Storage(task, setup.run_dir, setup.options.checkpoint, progress)
        self.lifecycle.exits.callback(self.storage.close)
        self._hyper = Hyperparameters(task, setup, progress)
        self._progress = progress

    def start(self) -> None:
        """Joins the job, and receives the values of its initial or restored step.

        Raises:
            TriremeError: this worker cannot take part; the job is told why.
        """
        lifecycle, setup, storage, progress = (
            self.lifecycle,
            self.setup,
            self.storage,
            self._progress,
        )
        try:
            self.backend = lifecycle.join()
            storage.epoch = lifecycle.epoch
            self.checkpoints = WorkerCheckpoints(lifecycle, setup, self.backend, storage, progress)
            self.buffers = self.checkpoints.buffers
            self.trainer = Trainer(
                lifecycle, setup, self.backend, self.checkpoints, self._hyper, progress
            )
            self.trainer.begin()
        except TriremeError as error:
            lifecycle.fail(error)
            raise
        except BaseException:
            storage.close()  # an interactive console continues, and may try again
            raise
        storage.begin(self.global_step, restored=self.checkpoints.restored_from is not None)
        if self.task.servers and lifecycle.is_chief:
            progress.message(storage.durability)

    @property
    def global_step(self) -> int:
        """The global step of the values that this worker has."""
        return self.backend.global_step

    @property
    def should_stop(self) -> bool:
        """Whether the job has reached its end; all workers agree on it."""
        return self.backend.stopping

    def fail(self, error: BaseException) -> None:
        """Tells the job why this worker failed; saves this worker's values if a server was lost."""
        if self.lifecycle.state in ("training", "saving"):
            self.checkpoints.rescue(error)
        self.lifecycle.fail(error)
