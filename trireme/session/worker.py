"""One worker of a job: its life, its training and its saving, put together."""

from __future__ import annotations

from trireme.errors import TriremeError
from trireme.session.backends.base import Backend
from trireme.session.checkpoint.storage import Storage
from trireme.session.checkpoint.worker_checkpoints import WorkerCheckpoints
from trireme.session.hyperparameters import Hyperparameters
from trireme.session.lifecycle import Lifecycle
from trireme.session.observers.progress import make_progress
from trireme.session.replica.buffers import Buffers
from trireme.session.stopping.last_iteration import LastIteration
from trireme.session.trainer import Trainer
from trireme.session.training_setup import TrainingSetup

__all__ = ["Worker"]


class Worker:
    """A worker's part in its job: connects lifecycle, training and checkpoints.

    Args:
        setup: what is trained.

    Attributes:
        setup: the argument.
        task: the identity of this process.
        progress: shows each state, and the tasks that the worker waits for.
        lifecycle, storage: parts of the worker.
        last_iteration: what the program's loop knows of the end of training.
        backend, buffers, checkpoints, trainer: further parts, once the worker has started.

    Raises:
        ConfigurationError: a session cannot have that scheduler.
    """

    backend: Backend
    buffers: Buffers
    checkpoints: WorkerCheckpoints
    trainer: Trainer

    def __init__(self, setup: TrainingSetup) -> None:
        settings = setup.settings
        self.setup = setup
        self.task = settings.task
        self.progress = make_progress(
            self.task.display if setup.shows_progress else "none",
            max_steps=settings.max_steps,
            log_every=settings.options.log_every,
        )
        self.lifecycle = Lifecycle(setup, self.progress)
        self.storage = Storage(settings, self.progress)
        self.last_iteration = LastIteration()
        self.lifecycle.exits.callback(self.storage.close)
        self._hyper = Hyperparameters(setup, self.progress)

    def start(self) -> None:
        """Joins the job, and receives the values of its initial or restored step.

        Raises:
            TriremeError: this worker cannot take part; the job is told why.
        """
        lifecycle, storage = self.lifecycle, self.storage
        try:
            self.backend = lifecycle.join()
            storage.epoch = lifecycle.epoch
            self.checkpoints = WorkerCheckpoints(lifecycle, storage)
            self.buffers = self.checkpoints.buffers
            self.trainer = Trainer(lifecycle, self.checkpoints, self._hyper)
            self.trainer.begin()
        except TriremeError as error:
            lifecycle.fail(error)
            raise
        except BaseException:
            storage.close()  # an interactive console continues, and may try again
            raise
        storage.begin(self.global_step, restored=self.checkpoints.restored_from is not None)
        if self.task.servers and lifecycle.is_chief:
            self.progress.message(storage.durability)

    @property
    def global_step(self) -> int:
        """The global step of the values that this worker has."""
        return self.backend.global_step

    @property
    def should_stop(self) -> bool:
        """Whether the job has reached its end; all workers agree on it."""
        return self.backend.stopping

    def asked_to_stop(self) -> bool:
        """Returns `should_stop`, and notes that the program's loop has asked."""
        return self.last_iteration.asked(self.backend.stopping)

    def save(self) -> None:
        """Saves a checkpoint now; see `Session.save`."""
        if self.lifecycle.is_chief or self.setup.process_group is not None:
            self.checkpoints.save()

    def fail(self, error: BaseException) -> None:
        """Tells the job why this worker failed; saves this worker's values if a server was lost."""
        if self.lifecycle.state in ("training", "saving"):
            self.checkpoints.rescue(error)
        self.lifecycle.fail(error)
