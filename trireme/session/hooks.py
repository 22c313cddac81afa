"""Hooks: a program's own code that a session calls at certain points.

    class Printer(trireme.session.hooks.Hook):
        def after_step(self, session, result):
            if result.global_step % 100 == 0:
                print(session.optimizer.param_groups[0]["lr"])

    trireme.Session(..., hooks=[Printer(), trireme.EarlyStopping("loss", 3)])

Hooks are called on every worker, in the order in which they were given. An exception from a hook is
an exception of the script: it propagates from the call that caused it (`step`, `evaluate`, the
`with` block), later hooks are not called, and the job fails with that traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trireme.location import RemotePath
from trireme.session.result import StepResult


class Hook:
    """Base class of hooks. Each method does nothing unless a subclass overrides it.

    Each is given the `trireme.Session` that calls it.
    """

    def on_start(self, session: Any) -> None:
        """Called when the session has joined its job and has its initial values."""

    def before_step(self, session: Any, batch: Any) -> None:
        """Called before a step trains on the batch."""

    def after_step(self, session: Any, result: StepResult) -> None:
        """Called after an update. Reading the result's loss or metrics may wait for a device."""

    def on_checkpoint(self, session: Any, path: Path | RemotePath) -> None:
        """Called on the chief, at a later step, when a checkpoint is on the disk.

        `path` is a `RemotePath`, whose text is a URL, where the run directory is in an object
        store.
        """

    def on_evaluate(self, session: Any, name: str, metrics: Mapping[str, float]) -> None:
        """Called after `Session.evaluate` with its `name`; `metrics` includes `loss`.

        `session.evaluated_step` is the global step of the values that were evaluated.
        """

    def on_stop(self, session: Any, reason: str) -> None:
        """Called when training has ended and is saved, unless the job failed.

        Args:
            session: the session.
            reason: `finished`, or what interrupted the job.
        """

    def on_fail(self, session: Any, error: BaseException) -> None:
        """Called when an exception in this process ends training; `on_stop` may not have been.

        An exception that it raises is added to the error as a note.

        Args:
            session: the session.
            error: the exception; `KeyboardInterrupt` or `SystemExit` where the script was ended.
        """
