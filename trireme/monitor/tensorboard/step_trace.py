"""The trace of one step by torch's profiler, for TensorBoard and viewers of Chrome traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.profiler

from trireme.monitor.tensorboard import xplane

__all__ = ["StepTrace"]


class StepTrace:
    """Traces from its creation until `stop`."""

    def __init__(self) -> None:
        self._profile: Any = torch.profiler.profile(record_shapes=True, profile_memory=True)
        self._profile.start()
        record: Any = torch.profiler.record_function
        self._whole = record(xplane.STEP)
        self._whole.__enter__()

    def stop(self) -> None:
        """Ends the trace. It must be called in the thread that began it."""
        self._whole.__exit__(None, None, None)
        self._profile.stop()

    def write(self, directory: Path, process: str, step: int) -> None:
        """Writes the trace twice: for the profiler plugin, and as a Chrome trace.

        The plugin lists each step as a session, and in it each process as a host.

        Args:
            directory: the directory of the run in TensorBoard's log directory.
            process: the name of this process.
            step: the global step.

        Raises:
            OSError: a file cannot be written.
        """
        session = directory / "plugins" / "profile" / f"step_{step:09}"
        session.mkdir(parents=True, exist_ok=True)
        events = self._profile.events() or ()
        (session / f"{process}.xplane.pb").write_bytes(xplane.encode(events, step))
        self._profile.export_chrome_trace(str(directory / f"{process}.{step:09}.pt.trace.json"))
