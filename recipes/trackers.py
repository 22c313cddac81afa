"""Hooks that log a run to MLflow or to Weights & Biases."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.errors import ConfigurationError
from trireme.files import write_atomically
from trireme.ps.optimizers import members
from trireme.session.hooks import Hook

if TYPE_CHECKING:
    from trireme.session.result import StepResult
    from trireme.session.session import Session


def run_settings(session: Session, examples: int) -> dict[str, Any]:
    """Returns the settings of a run by name: numbers, strings and booleans."""
    options, task = session.options, session.task
    group = session.optimizer.param_groups[0]
    settings: dict[str, Any] = {
        "model": type(session.model).__name__,
        "parameters": sum(p.numel() for p in session.model.parameters()),
        "optimizer": ", ".join(type(each).__name__ for each in members(session.optimizer)),
        **{name: value for name, value in group.items() if name != "params"},
        "strategy": task.config.training.strategy or str(options.strategy),
        "workers": task.workers,
        "servers": task.servers,
        "batch_size": examples,
        "max_steps": session.max_steps,
        "precision": options.precision,
        "accumulate": options.accumulate if options.accumulate > 1 else None,
        "clip_norm": options.clip_norm,
        "l2": options.l2 or None,
        "seed": options.seed,
    }
    return {  # those that are off would crowd out the chosen ones
        name: value if isinstance(value, (bool, str, int, float)) else str(value)
        for name, value in settings.items()
        if value is not None and value is not False
    }


class Tracker(Hook):
    """Logs the loss and the metrics of the chief's steps, and all evaluations, by global step.

    The settings of the session are logged with the first step. The chief alone logs; another worker
    that becomes chief goes on with the same run, and so does a resumed job: the run's id is kept in
    the run directory.

    A `ConfigurationError` says that `every` is below 1; or, when training begins, that the
    tracker's package is not installed.
    """

    package: str
    """The package to import, which is also the name of the file with the run's id."""

    def __init__(
        self, every: int = 100, *, config: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        if every < 1:
            raise ConfigurationError(
                f"{type(self).__name__}(every={every!r}): give a whole number from 1"
            )
        self._every = every
        self._config = dict(config or {})
        self._options = options
        self._last: int | None = None
        self._run: Any = None
        self._module: Any = None

    def on_start(self, session: Session) -> None:
        try:
            self._module = importlib.import_module(self.package)
        except ImportError as error:
            raise ConfigurationError(
                f"{type(self).__name__} needs the package {self.package!r}, which cannot be "
                f"imported ({error}): install it, or leave the hook out"
            ) from error
        if session.is_chief:  # here, as it may take seconds, and not in a step that others wait for
            self._begin(session)

    def after_step(self, session: Session, result: StepResult) -> None:
        step = result.global_step
        if self._last is not None and step // self._every <= self._last // self._every:
            return
        first, self._last = self._last is None, step
        if not session.is_chief:
            return
        self._begin(session)
        if first:
            self._log_settings(run_settings(session, result.examples) | self._config)
        self._log({"loss": result.loss, **result.metrics}, step)

    def on_evaluate(self, session: Session, name: str, metrics: Mapping[str, float]) -> None:
        if session.is_chief:
            self._begin(session)
            values = {f"{name}/{metric}": value for metric, value in metrics.items()}
            assert session.evaluated_step is not None
            self._log(values, session.evaluated_step)

    def on_stop(self, session: Session, reason: str) -> None:
        self._end(failed=False, stopped=reason != "finished")

    def on_fail(self, session: Session, error: BaseException) -> None:
        stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
        self._end(failed=not stopped, stopped=stopped)

    def _begin(self, session: Session) -> None:
        """Starts the run, or resumes it, where this worker has not done so."""
        if self._run is not None:
            return
        file = None if session.run_dir is None else Path(session.run_dir) / f"{self.package}.id"
        known = file.read_text().strip() if file is not None and file.exists() else None
        self._run, run_id = self._open(known, None if file is None else file.parent.name)
        if file is not None and run_id != known:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, f"{run_id}\n".encode())

    def _end(self, *, failed: bool, stopped: bool) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._close(run, failed=failed, stopped=stopped)

    @abstractmethod
    def _open(self, run_id: str | None, name: str | None) -> tuple[Any, str]:
        """Starts a run of this name, or resumes the one of this id; returns it with its id."""

    @abstractmethod
    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        """Logs the settings of the run; those of a resumed run may have changed."""

    @abstractmethod
    def _log(self, values: Mapping[str, float], step: int) -> None:
        """Logs values of a global step."""

    @abstractmethod
    def _close(self, run: Any, *, failed: bool, stopped: bool) -> None:
        """Ends the run with its status."""


class MLflow(Tracker):
    """Logs a run to MLflow, at the tracking address that MLflow is configured for.

    `mlflow.set_tracking_uri`, `mlflow.set_experiment` and MLflow's environment variables say where.

    Args:
        every: the number of global steps between two logged steps; the first step is logged too.
        config: further settings of the program to log.
        options: further arguments of `mlflow.start_run`, such as `run_name` and `tags`.
    """

    package = "mlflow"

    def _open(self, run_id: str | None, name: str | None) -> tuple[Any, str]:
        if run_id is not None:
            run = self._module.start_run(run_id=run_id)
        else:
            run = self._module.start_run(**{"run_name": name, **self._options})
        return run, run.info.run_id

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        # MLflow refuses another value of a parameter that it has, such as the workers of a job
        # that resumes with more.
        client, run_id = self._module.MlflowClient(), self._run.info.run_id
        known = client.get_run(run_id).data.params
        for name, value in settings.items():
            if name not in known:
                self._module.log_param(name, value)
            elif known[name] != str(value):
                self._module.set_tag(f"resumed/{name}", value)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log_metrics(dict(values), step=step)

    def _close(self, run: Any, *, failed: bool, stopped: bool) -> None:
        self._module.end_run("FAILED" if failed else "KILLED" if stopped else "FINISHED")


class WandB(Tracker):
    """Logs a run to Weights & Biases; its environment variables and `options` say how.

    Curves are over `global_step`, so that a job that resumes at an earlier step than it had logged
    is shown rightly. With `mode="offline"` nothing leaves the machine until `wandb sync`.

    Args:
        every: the number of global steps between two logged steps; the first step is logged too.
        config: further settings of the program to log.
        options: further arguments of `wandb.init`, such as `project`, `mode` and `tags`.
    """

    package = "wandb"

    def _open(self, run_id: str | None, name: str | None) -> tuple[Any, str]:
        known = {} if run_id is None else {"id": run_id, "resume": "allow"}
        run = self._module.init(**{"name": name, **self._options, **known})
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")
        return run, run.id

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        self._run.config.update(dict(settings), allow_val_change=True)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "global_step": step})

    def _close(self, run: Any, *, failed: bool, stopped: bool) -> None:
        run.finish(exit_code=1 if failed else 130 if stopped else 0)
