"""The session: trains a program written for one device, with the parallelism set at launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch import nn

from trireme.data.batch import Batch
from trireme.errors import ConfigurationError
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.environment import current_task
from trireme.launch.hooks import launched_hooks
from trireme.launch.program_directory import name_run_dir
from trireme.ps.messages import Stale
from trireme.ps.optimizers import JointOptimizer
from trireme.ps.results import PushResult
from trireme.session.data.feed import DataFeed
from trireme.session.data_methods import DataMethods
from trireme.session.loss import Loss
from trireme.session.metric_value import Metric, own_metrics
from trireme.session.model.building import Optimizers, build_model
from trireme.session.model.seeding import Seeding
from trireme.session.model.trained import clip
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.options import Options, OptionValues, check_whole, make_options
from trireme.session.result import StepResult
from trireme.session.settings import Settings
from trireme.session.worker.assembly import assemble, computations_of
from trireme.session.worker.dry_run import end_if_dry_run
from trireme.session.worker.job import Job

_TAKES_PART = 1e-9  # no number of examples, but not 0 either, as of updates that are left out


class Session(DataMethods):
    """Trains a model in one process, or as one worker of a job; the program is the same.

    A session is a context manager: it joins the job on entry; on exit it saves and leaves the job.
    An exception inside the block fails the job, with the exception as the reason.

    Args:
        model: a module, or a function without arguments that builds one.
        loss: (outputs, targets) -> the mean loss over the batch, as a scalar or as the entry
            `loss` of a dict; `trireme.model_loss` for a model that computes its own loss from a
            batch with `labels`.
        optimizer: an optimizer over the model's parameters, or a function that builds one from
            them. Several optimizers, such as a generator's and a discriminator's, are given as a
            dict by name, or as a list; `step` then names the optimizer that makes the step. A
            function in a dict builds the optimizer from the parameters of the model's child of
            the same name.
        metrics: by name, (outputs, targets) -> the mean over the batch; or metrics of TorchMetrics,
            which an evaluation updates with each batch and computes once.
        run_dir: the directory of checkpoints and records, or a URL such as `s3://bucket/run`
            (docs/file_systems.md); the launcher's `--run-dir` goes first.
        max_steps: the global step at which training ends; None for no end.
        precision (default "float32"): `bfloat16` computes forward and loss under autocast;
            parameters and updates keep their dtype.
        accumulate (default 1): the number of pieces in which each batch is computed, one after the
            other, to save memory; the update is the same, with `weight` also where the loss is no
            mean over examples.
        clip_norm (default None): the global L2 norm to which gradients are scaled down. Synchronous
            strategies clip the mean of the round, as one process would; others clip each push.
        ema (default None): the decay of an exponential moving average of the parameters, or an
            `Average`; `evaluate` uses the average. A number includes warm-up: min(decay, (1 + n) /
            (10 + n)).
        scheduler (default None): a learning-rate scheduler over the optimizer, or a function that
            builds one from it; it counts global steps.
        l2 (default 0.0): adds l2 / 2 times the sum of the squares of all trained parameters with
            two or more dimensions to the loss (not of biases). The displayed loss does not include
            it.
        seed (default 0): the seed of all randomness: of torch, NumPy and `random`, the order of the
            examples and what their data set draws for each.
        deterministic (default False): whether a run is bit-equal to its repetition, and a resumed
            run to an uninterrupted one (but for buffers that differ by worker); for synchronous
            strategies, and for one worker. Pass a function that builds the model, or seed torch
            before building it: the session cannot seed an existing module's initial values.
        checkpoint (default Checkpoint()): when to save and which checkpoints to keep; None never
            saves.
        resume (default "auto"): `auto` continues from the newest undamaged checkpoint of the run
            directory, if there is one; `never` refuses a run directory with checkpoints; a path
            names a checkpoint.
        hooks (default ()): the hooks; see `trireme.session.hooks`.
        strategy (default "auto"): the strategy; `auto` takes that of the launch.
        nan (default "raise"): the policy for a NaN or infinite loss: `raise` fails the job, `skip`
            leaves the update out and counts it, `ignore` does not check.
        log_every (default 100): the number of a worker's steps between two lines of progress, and
            of the chief's steps between two records of the metrics.
        device (default None): the device of the model; None leaves it where it is, or, where
            several processes compute together, takes a GPU for each process.
        pipeline (default PipelineConfig()): the configuration of the pipeline, where there is one.
        graph (default GraphConfig()): the placement of the model as a dataflow graph, under the
            strategy `graph`.
        tensor_plan (default None): under tensor parallelism, pattern of a module's name ->
            `column`, `row` or `gathered`; None derives a plan for transformer blocks and chains of
            linear layers.
        weight (default None): (batch, outputs) -> the number that the mean loss of a batch is the
            mean of, such as that of its tokens, by which workers, the pieces of `accumulate` and
            the batches of an evaluation (metrics too) are weighed. None counts the examples; under
            `model_loss`, the labels that are not -100.

    Raises:
        ConfigurationError: an option is unknown or out of range.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        optimizer: Optimizers,
        *,
        metrics: Mapping[str, Metric] | None = None,
        run_dir: str | Path | None = None,
        max_steps: int | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        _check_arguments(model, loss, optimizer)
        if max_steps is not None:
            max_steps = check_whole("max_steps", max_steps, least=0)
        self.task: TaskConfig = current_task()
        self.options: Options = _with_launched_hooks(make_options(options), self.task)
        self.metrics = own_metrics(metrics)
        self._settings = Settings.of(self.task, self.options, run_dir, max_steps)
        self.run_dir = self._settings.run_dir
        name_run_dir(self.task, None if self._settings.remote else self.run_dir)
        self.max_steps = max_steps
        self._make_model = model
        self._loss = loss
        self._make_optimizer = optimizer
        self._entered = False
        self._job: Job | None = None
        self._in_step = False
        self._collected_step = -1  # of the values that the whole model has, if parts are trained

    # -- joining and leaving ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Joins the job and receives its initial values.

        Raises:
            TriremeError: this worker cannot take part in the job.
        """
        if self._entered:
            raise ConfigurationError("this session was entered before: create a new one")
        self._entered = True
        if self.options.deterministic:
            torch.use_deterministic_algorithms(True)
        _ = self._settings.rule  # an invalid one is refused before anything is built
        self._build()
        end_if_dry_run(self._setup)
        self._job = job = Job(self._setup)
        self._feed = DataFeed(job)
        several = range(len(self._setup.parameters_of_each()))
        given = self._make_optimizer
        named = given if isinstance(given, Mapping) else several
        self._places: dict[str | int, int] = dict(zip(named, several, strict=False))
        if self._setup.process_group is None:
            flat = self._setup.flat
            flat.keeps_views = flat.device.type != "cpu"  # GPU memory is scarce
        self._seeding = Seeding(self._setup)
        self._seeding.begin(job.worker.global_step)
        job.before_end = self._feed.warn_of_left_out
        job.after_end = self._collect_final_values
        job.on_checkpoint = lambda path: self._call_hooks("on_checkpoint", path)
        job.on_stop = lambda reason: self._call_hooks("on_stop", reason)
        job.on_fail = self._tell_hooks
        job.exits.callback(self._feed.close)
        try:
            self._call_hooks("on_start")
        except BaseException as error:  # `__exit__` is not called for what `__enter__` raises
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Saves and leaves the job, also after `sys.exit(0)`; another exception fails the job.

        Raises:
            SystemExit: with status 130, where the job was interrupted and saved, or 143, where
                this worker leaves it, as SIGTERM has asked it to.
        """
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None  # the program ends without an error
        if error is not None:
            self.worker.note(error)
        self.job.leave(error)

    def _call_hooks(self, event: str, *arguments: object) -> None:
        for hook in self.options.hooks:
            getattr(hook, event)(self, *arguments)

    def _tell_hooks(self, error: BaseException) -> None:
        """Calls `on_fail` of all hooks; what they raise does not hide the error."""
        for hook in self.options.hooks:
            try:
                hook.on_fail(self, error)
            except Exception as another:
                error.add_note(f"{type(hook).__name__}.on_fail raised {another!r}")

    def _build(self) -> None:
        settings = self._settings
        self._setup: TrainingSetup = assemble(
            settings,
            lambda: build_model(self._make_model, settings),
            self._make_optimizer,
            given=self._make_model,
        )
        self.optimizer: torch.optim.Optimizer = self._setup.optimizer
        self._computation, self._evaluator = computations_of(self._setup, self._loss, self.metrics)

    @property
    def job(self) -> Job:
        """This process's part in the job; for Trireme's own hooks."""
        if self._job is None:
            raise ConfigurationError(
                "the session has not joined its job yet: train and evaluate inside `with session:`"
            )
        return self._job

    # -- properties -----------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The whole model.

        Where processes train parts of it (`fsdp`, `tensor`, `pipeline`, `graph`), the chief's has
        the values of the present step: reading this property collects them, between two steps. The
        other processes' have those of the end of the last loop over `epochs`, and of the end of
        training.
        """
        if not self._entered:
            raise ConfigurationError("the session builds its model on entry: use `with session:`")
        collects = self._job is not None and self.is_chief and not self._in_step
        if collects and self._trains_parts and self._collected_step != self.global_step:
            self._collected_step = self.global_step
            self.worker.buffers.collect_values()
        return self._setup.model

    def _collect_final_values(self) -> None:
        if self._setup.part is not None and not self._setup.lean:
            self.worker.buffers.collect_values(final=True)

    @property
    def restored_from(self) -> int | None:
        """The step of the checkpoint that this worker, as chief, restored; None for none."""
        return self.worker.checkpoints.restored_from

    @property
    def pipeline(self) -> Any:
        """What runs this process's stages or operations; None without a pipeline or a graph."""
        return self._computation.pipeline

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters that this process holds, by their names in the model.

        Where processes hold the model together, these are the parameters of this process's part,
        and may be shards.
        """
        return self._computation.flat.parameters

    def stop(self, reason: str) -> None:
        """Requests, from any worker, the end of the job at the next step at which all can end.

        Args:
            reason: why, for the messages of the job.
        """
        self.worker.stop(reason)

    # -- training -------------------------------------------------------------------------------

    @property
    def batches_per_step(self) -> int:
        """The number of batches in one global step, such as those of a synchronous round."""
        return self._settings.batches_per_step

    def step(
        self, batch: Any, *, optimizer: str | int | None = None, loss: Loss | None = None
    ) -> StepResult:
        """Makes one update of the job from a batch: one global step, or a part of one.

        With several optimizers, one of them makes the step, with the gradients of its own
        parameters. The parameters and the states of the other optimizers stay as they are. Each
        such step is a global step: a generator and a discriminator in turn make two. Workers that
        make steps together must step the same optimizers in the same order.

        Where training ends in the middle of an iteration of the program's loop, the remaining
        steps of that iteration make no update: their verdict is `trireme.Stale`.

        Args:
            batch: a batch of `loader`, or any structure of tensors: a pair of inputs and targets,
                a longer tuple whose last item is the targets, or a mapping with `targets` or
                `labels`, which stay in the mapping for a model that computes its own loss. A batch
                that is not a loader's counts as made of all examples that loaders have handed out
                since the last update.
            optimizer: the optimizer that makes the step, where there are several: its name, or
                its index in a list.
            loss: replaces the session's loss for this step.

        Raises:
            ConfigurationError: the loop continues after training has ended (its result is saved);
                the session was not entered; there is no such optimizer; or another process that
                makes the step together with this one steps another optimizer.
            SystemExit: with status 130, where training has ended because the job was interrupted,
                or 143, where this worker leaves it.
            NonFiniteError: the loss is NaN or infinite, and the policy is to raise.
            JobFailed: the job has ended elsewhere; the message says where and why.
        """
        job, worker, feed = self.job, self.worker, self._feed
        if not job.may_update():
            with self._trained_by(loss):
                result = self._computation.backward(batch)
            step = result.global_step = worker.global_step
            result.decide(PushResult(Stale(step), step, 0, True))
            feed.updated(batch)
            return result
        self._choose(optimizer)
        self._call_hooks("before_step", batch)
        began, spans = time.monotonic(), feed.spans_of(batch)
        if self._in_step:
            raise ConfigurationError("only one thread may call `step` of a session at a time")
        self._in_step = True  # and all processes take part in nothing else meanwhile
        try:
            result = self._sound_gradient(batch, loss)
            computed = time.monotonic()
            feed.updated(batch)
            if (extension := self._setup.extension) is not None and extension.looks_ahead:
                extension.expect(feed.upcoming())
            pushed = worker.update(_weight_of(result, batch), spans, feed.prepare)
        finally:
            self._in_step = False
        if pushed is not None:
            result.decide(pushed)
        result.global_step = worker.global_step
        result.seconds = time.monotonic() - began
        job.recorder.step(result, began, computed)
        self._call_hooks("after_step", result)
        self._seeding.loop(worker.global_step)
        if worker.storage.completed:
            job.announce_checkpoints()
        return result

    def _choose(self, name: str | int | None) -> None:
        joint = self._setup.optimizer
        if isinstance(joint, JointOptimizer):
            if name is None or name not in self._places:
                known = ", ".join(map(repr, self._places))
                raise ConfigurationError(
                    f"step(batch, optimizer={name!r}): say which optimizer, one of {known}"
                )
            joint.chosen = self._places[name]
        elif name is not None:
            raise ConfigurationError(
                f"step(batch, optimizer={name!r}): this session has one optimizer; give it several "
                "by name, in a dict"
            )

    def _sound_gradient(self, batch: Any, loss: Loss | None) -> StepResult:
        """Computes a gradient; once more, where an observer has mended the values meanwhile."""
        while True:
            failure: Exception | None = None
            try:
                result = self._gradient(batch, loss)
            except Exception as error:
                failure = error
            if self.worker.is_sound():
                if failure is not None:
                    raise failure
                return result

    def _gradient(self, batch: Any, loss: Loss | None) -> StepResult:
        """Computes the gradient of a batch; the fields of the update are not set yet."""
        worker, setup, joint = self.worker, self._setup, self._setup.optimizer
        extension, limit = setup.extension, setup.settings.clip_norm
        if extension is not None:
            extension.forget()
        for observer in worker.observers.values():
            observer.before_gradient(self._computation, batch)
        self._seeding.step(worker.global_step)
        worker.begin_step()
        setup.agree_on_optimizer()
        with self._trained_by(loss):
            result = self._computation.backward(batch)
        if isinstance(joint, JointOptimizer):
            for place, parameters in enumerate(setup.parameters_of_each()):
                if place != joint.chosen:  # which does not update them
                    for parameter in parameters:
                        parameter.grad = None
        if limit is not None:
            clip(self._computation.flat, limit, extension)
        return result

    def _trained_by(self, loss: Loss | None) -> AbstractContextManager[None]:
        return nullcontext() if loss is None else self._computation.another_loss(loss)


def _weight_of(result: StepResult, batch: Any) -> float:
    """Returns the weight of an update: above 0 unless it is to be left out."""
    takes_part = result.examples or (isinstance(batch, Batch) and not batch.spans)
    return (result.weight or _TAKES_PART) if takes_part else 0.0


def _with_launched_hooks(options: Options, task: TaskConfig) -> Options:
    if task.draw is not None:  # which leaves no trace in a run directory
        return replace(options, hooks=(), checkpoint=None, resume="auto")
    return replace(options, hooks=(*options.hooks, *launched_hooks(task.config)))


def _check_arguments(model: object, loss: object, optimizer: object) -> None:
    """Checks that what a session trains is of the right kinds, and in the right order."""
    swapped = isinstance(loss, torch.optim.Optimizer) or isinstance(optimizer, nn.Module)
    if swapped or not (callable(model) and callable(loss)):
        given = ", ".join(type(each).__name__ for each in (model, loss, optimizer))
        raise ConfigurationError(
            f"Session({given}): write Session(model, loss, optimizer), with a module or a function "
            "that builds one, and a function of outputs and targets, such as "
            "torch.nn.CrossEntropyLoss() or trireme.model_loss"
        )
