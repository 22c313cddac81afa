"""Checks that the options of a job are consistent with each other.

Each strategy checks the values of its own options itself.
"""

from __future__ import annotations

from trireme.errors import UsageError
from trireme.job_config import OPTIONS, JobConfig
from trireme.mesh import Mesh

__all__ = ["check_engine", "check_together"]


def check_engine(config: JobConfig) -> None:
    """Checks that the options about where tasks run are consistent.

    Raises:
        UsageError: they are not; the message says what to do.
    """
    if config.on == "ray":
        if config.workers == "auto":
            raise UsageError(
                "workers is auto, which counts the GPUs of this host, and not those of a Ray "
                "cluster: give --workers N"
            )
        return
    for option in OPTIONS:
        elsewhere = option.name.startswith("ray-") or option.field == "allow_plaintext"
        if elsewhere and config.origin(option.field) == "command line":
            raise UsageError(f"--{option.name} is for jobs on a Ray cluster: add --on ray")


def check_together(config: JobConfig, servers: int) -> None:
    """Checks that the mesh, the codec and the number of servers are consistent.

    Raises:
        UsageError: they are not; the message says what to do.
    """
    mesh = Mesh.parse(config.mesh)
    if config.uncommitted and servers < 2:
        raise UsageError(
            f"uncommitted is on ({config.origin('uncommitted')}), and this job has {servers} "
            "servers: only several servers have to agree on an update; leave out --uncommitted"
        )
    if servers:
        if mesh.size > 1 and config.prefetch:
            raise UsageError("prefetch is for workers of one process: leave out --prefetch")
    elif config.compress != "none" and (mesh.size > 1 or config.workers != 1):
        raise UsageError(
            f"compress is {config.compress} ({config.origin('compress')}): codecs pack what "
            "workers push to parameter servers; add --ps 1"
        )
    pipelined = mesh.pp > 1 or config.strategy in ("pipeline", None)
    for name in ("schedule", "microbatches"):
        if getattr(config, name) is not None and not pipelined:
            raise UsageError(
                f"{name} is {getattr(config, name)} ({config.origin(name)}), and there is no "
                "pipeline: add --mesh pp=2 or --strategy pipeline"
            )
