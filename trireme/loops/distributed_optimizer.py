"""The optimizer of a program's own loop, whose `step` pushes and pulls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from trireme.errors import ConfigurationError
from trireme.loops.kept_state import Stateful
from trireme.loops.loop_data import PreparedLoader
from trireme.loops.loop_job import LoopJob
from trireme.ps.optimizers import name_of
from trireme.session.job_methods import JobMethods
from trireme.session.worker.hyperparameters import hooks_of
from trireme.session.worker.job import Job


class DistributedOptimizer(JobMethods, torch.optim.Optimizer):
    """An optimizer whose updates the job makes; `distribute` creates it.

    Its parameter groups are those of the given optimizer, so that schedulers act on both. The
    methods that record for TensorBoard are those of a session.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, loop: LoopJob, index: int) -> None:
        # Not Optimizer.__init__: the groups must be the same objects. A scheduler that was created
        # before has replaced the given optimizer's `step`; that attribute is not copied.
        own = {
            name: value for name, value in vars(optimizer).items() if not hasattr(type(self), name)
        }
        self.__dict__.update(own)
        # Called here, for the given optimizer makes steps in some strategies only. Those that it is
        # given later its own steps call, or `_call_hooks` does.
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(optimizer, hooks, type(own[hooks])())
        self._given = optimizer
        self._state = self.state
        self._loop = loop
        self._index = index
        if (
            loop.job.worker.global_step
        ):  # schedulers are advanced before the first step, and check it
            optimizer._opt_called = self._opt_called = True  # type: ignore[attr-defined]

    @property
    def job(self) -> Job:
        return self._loop.job

    @property
    def model(self) -> nn.Module:
        """The module that the loop calls, or a container of several."""
        return self._loop.model

    def log(
        self,
        values: Mapping[str, float | torch.Tensor] | None = None,
        *,
        run: str = "train",
        step: int | None = None,
        **named: float | torch.Tensor,
    ) -> None:
        """Records numbers, as `Session.log`; `loss` is also shown by `trireme top`."""
        values = {**(values or {}), **named}
        if run == "train" and (loss := values.get("loss")) is not None:
            self._loop.loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        super().log(values, run=run, step=step)

    @property
    def replica(self) -> int:
        """The index of this process's batch among the `replicas` of a step, from 0."""
        return self.worker.setup.replica

    @property
    def replicas(self) -> int:
        """The number of batches that the job computes at a time."""
        return self.worker.setup.replicas

    @property
    def loop_steps(self) -> int:
        """The number of steps that each worker's loop has behind it, with those before a resume.

        A schedule that the loop steps counts these, not the global steps. Before each step of the
        loop, `while scheduler.last_epoch < optimizer.loop_steps: scheduler.step()` advances it to
        where the job is, also in a worker that was started again.

        Under asynchronous strategies it is the global step divided by the number of workers; with
        several optimizers, which step in turn, by their number too.
        """
        self.worker.hyper.counted = True
        steps = self.worker.setup.settings.steps_of_a_loop(self.global_step)
        return steps // len(self._loop.parameters)

    def step(
        self, closure: Callable[[], Any] | None = None, *, examples: float | None = None
    ) -> Any:
        """Pushes the gradients and brings the new values; returns what the closure returns.

        After training has ended it makes no update in the rest of that iteration of the loop, as
        `Session.step`. Leave the loop when `should_stop()` returns True.

        Args:
            closure: recomputes the loss and the gradients, as for any optimizer. An optimizer of
                one's own may call it several times: all processes that step together do, and each
                time the gradients and the loss are the means over them.
            examples: the number of examples that the gradient is the mean of, where workers'
                batches differ in size. None for the number in the batches of `epochs` or
                `prepare`; without these all batches count alike.

        Raises:
            ConfigurationError: the loop continues after training has ended; its result is saved.
            SystemExit: with status 130, where training has ended because the job was interrupted,
                or 143, where this worker leaves it.
            JobFailed: the job has ended elsewhere; the message says where and why.
        """
        updates = self._loop.may_update()
        if self.state is not self._state:  # the program has put another in its place
            self._given.state = self.state
        self._state = self.state = self._given.state
        self._call_hooks("pre", closure)
        loss = None
        passed = closure if updates and self._calls_closures(closure) else None
        if closure is not None and passed is None:
            with torch.enable_grad():
                loss = closure()
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._loop.loss = loss.detach()
        if not updates:
            return loss
        self._loop.update(self._index, examples, passed)
        if passed is not None:
            loss = self.worker.backend.returned
        self._given._opt_called = True  # type: ignore[attr-defined]  # schedulers check it
        self._call_hooks("post", closure)
        return loss

    def epochs(
        self, loader: DataLoader[Any], count: int, *, name: str = "train"
    ) -> Iterator[tuple[int, Any]]:
        """Iterates over this worker's batches in the epochs that the job has left.

            for epoch, batch in optimizer.epochs(DataLoader(data, 32, shuffle=True), 3):
                optimizer.zero_grad()
                loss_of(batch).backward()
                optimizer.step()

        The job deals each example of an epoch to one worker, and again where a worker is lost
        before its step. A job that is resumed, and a worker that is started again, goes on where
        the job is. The loop ends where training ends; in the last epoch it waits until all examples
        are in the parameters: make a step from each batch.

        Args:
            loader: loads all examples, in the same order on every worker: without a
                `DistributedSampler`, and without a slice of the data.
            count: the number of epochs in all.
            name: the data set's name, where a program trains on several.

        Raises:
            ConfigurationError: the loader is none, or its order cannot be dealt; or `count` is no
                whole number of 0 or more.
        """
        return self._loop.data.epochs(loader, count, name)

    def prepare(
        self, loader: DataLoader[Any], *, epochs: int | None = None, name: str = "train"
    ) -> PreparedLoader:
        """Returns a loader of this worker's batches, for a loop that is a library's.

        Each iteration over it has this worker's share of an epoch, dealt as by `epochs`: whatever
        the library counts, the first goes on where the job is. Of a data set without a length, an
        iteration is an epoch of the job.

        Args:
            loader: loads all examples; see `epochs`.
            epochs: after so many epochs of the job an iteration is empty; None for no end.
            name: the data set's name, where a program trains on several.

        Raises:
            ConfigurationError: as for `epochs`.
        """
        return self._loop.data.prepare(loader, epochs, name)

    def keep(self, name: str, held: Stateful) -> bool:
        """Keeps a program's own state in the job: a best score, a scaler, a schedule of its own.

        The chief's state is saved with each checkpoint, as it is in the step that is saved. Where
        the job has one of that name, by a resume or in a worker that was started again, it is
        loaded at once. Schedules that count steps need no keeping: see `loop_steps`.

        Without servers all processes must call it, with the same names. Returns whether a state was
        loaded.

        Args:
            name: the name in checkpoints.
            held: an object with `state_dict` and `load_state_dict`. The state has numbers, text,
                bytes, None, tensors, and lists and mappings of these; tuples come back as lists.

        Raises:
            ConfigurationError: another object has the name, or a checkpoint cannot hold its state.
        """
        return self._loop.kept.keep(name, held)

    def synchronize(self, *, examples: float | None = None) -> None:
        """Averages the gradients over all processes that make the step together with this one.

        It may be called between backward and what the loop does with gradients, such as
        `clip_grad_norm_` or `GradScaler.step`, which then see what they see in one process. Without
        it `step` averages them, after the loop has changed each process's own.

        With parameter servers, which average the gradients of workers themselves, and in one
        process it does nothing: give `clip_norm` to `distribute`. `examples` are as for `step`.
        """
        self._loop.synchronize(self._index, examples)

    def _calls_closures(self, closure: Callable[[], Any] | None) -> bool:
        """Returns whether the given optimizer is to call a closure itself, such as SAM's does.

        Those of `torch.optim` call it once, before all else, as `step` does for them.
        """
        if closure is None or name_of(self._given) is not None:
            return False
        if self.worker.task.servers:
            raise ConfigurationError(
                f"step(closure): the closure of {type(self._given).__name__} would be evaluated "
                "once and not by the optimizer itself, as the values come from parameter servers "
                "in between: use an optimizer whose step needs no closure, or train without "
                "servers (--strategy allreduce or fsdp)"
            )
        return True

    def _call_hooks(self, when: Literal["pre", "post"], closure: Callable[[], Any] | None) -> None:
        """Calls the hooks of the step, and those of the given optimizer where it makes none."""
        named = f"_optimizer_step_{when}_hooks"
        hooks: list[tuple[torch.optim.Optimizer, Callable[..., Any]]] = []
        hooks += [(self, hook) for hook in vars(self)[named].values()]
        if self.worker.setup.served:
            hooks += [(self._given, hook) for hook in hooks_of(self._given, when)]
        for optimizer, hook in hooks:
            if hook(optimizer, (closure,), {}) is not None:
                raise ConfigurationError(
                    f"{hook!r}, a hook of the optimizer's step, has returned other arguments for "
                    "step: a distributed optimizer takes none from hooks"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of this optimizer's parameters, or sets them to zero.

        Where they are dropped, `step` leaves parameters unchanged that backward does not reach, as
        `torch.optim` does. Those of rows of sparse tables are dropped, as after each step.
        """
        self._loop.take_parameters()
        parameters = self._loop.parameters[self._index]
        if self.worker.backend.grows:  # also those that the next step takes over
            parameters = [each for group in self.param_groups for each in group["params"]]
        for parameter in parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
        self._loop.drop_extra_gradients()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads hyper-parameters, and the optimizer's state where this process holds it.

        Where parameter servers run the optimizer, they hold its state: `state_dict()` has the
        hyper-parameters only, and the job's checkpoints have the state.

        Raises:
            ConfigurationError: it has a state, and parameter servers run the optimizer.
        """
        setup = self.worker.setup
        if state_dict["state"] and setup.served:
            raise ConfigurationError(
                "load_state_dict: parameter servers run this optimizer and hold its state, which a "
                "worker cannot replace: the job restores it from the checkpoints of its run "
                'directory. To load only the hyper-parameters, give {**saved, "state": {}}'
            )
        if setup.served and self.global_step:  # `state_dict()` has no state
            self.worker.warn_as_chief(
                "load_state_dict: parameter servers hold this optimizer's state, such as momentum, "
                "and keep it: only hyper-parameters are loaded"
            )
        given, groups, state = self._given, self.param_groups, self._given.state
        given.load_state_dict(dict(state_dict))
        for group, loaded in zip(groups, given.param_groups, strict=True):
            group.update(loaded)  # the job and schedulers have these very objects
        given.param_groups = groups
        if setup.served:  # which loads none
            given.state = state
        self.state = given.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which the next step takes over; with servers this call does.

        All processes must add the same, with the same values.

        Raises:
            ConfigurationError: the job trains the parameters that it began with.
        """
        if self.worker.backend.grows:
            self._given.add_param_group(param_group)
            self._loop.take_parameters()
            return
        raise ConfigurationError(
            "add_param_group: the job trains the parameters of the optimizer that distribute was "
            "given. To unfreeze parameters later, put them into that optimizer, and call "
            "requires_grad_(False) on them after distribute: without a gradient they are left alone"
        )

    def close(self) -> None:
        """Saves, and leaves the job, with all its optimizers. May be called again.

        After it the model has the values of the job's last step. Before, under asynchronous
        strategies, it has those that the last `step` has brought.

        Raises:
            SystemExit: with status 130, where the job was interrupted and saved, or 143, where this
                worker leaves it, as SIGTERM has asked it to.
        """
        self.job.leave()
