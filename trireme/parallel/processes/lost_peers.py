"""Says which processes of a process group are gone, in place of what torch.distributed raises."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from trireme.errors import JobFailed, TriremeError, WaitTimeout
from trireme.launch.exit_reason import says_peer_is_gone

REASONS: list[Callable[[float], TriremeError | None]] = []
"""Who knows why a collective of this process has failed: see `ProcessGroup.explain_by`."""
_REASON_SECONDS = 0.5

_LOSS_SECONDS = 1.0
"""Seconds for the other processes to notice a loss: well below a launcher's grace period."""

_LATE = re.compile(r"timed? ?out", re.IGNORECASE)


@contextmanager
def lost_peer() -> Iterator[None]:
    """Raises Trireme's errors for those that torch.distributed raises when a process is lost."""
    try:
        yield
    except RuntimeError as error:  # every error of torch.distributed is one
        line = first_line(error)
        reason = why_broken(error)
        if reason is not None:
            raise reason from error
        if says_peer_is_gone(error):
            raise JobFailed(
                f"{_lost_ranks()}, and its part of the model with it ({line})"
            ) from error
        ours = isinstance(error, dist.DistError) or "gloo" in line.lower()
        if ours and _LATE.search(line):
            raise WaitTimeout(
                "another process of this job did not join an operation in time: does every "
                f"process call the same methods of its session? ({line})"
            ) from error
        raise


def why_broken(error: BaseException) -> TriremeError | None:
    """Returns why a collective has failed, where this process knows more than torch says."""
    if not says_peer_is_gone(error):
        return None
    known = [reason(_REASON_SECONDS) for reason in REASONS]
    return next((reason for reason in known if reason is not None), None)


def _lost_ranks() -> str:
    """Returns which processes are gone; waits for a store that may be gone itself."""
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(_silent_ranks()), daemon=True)
    asking.start()
    asking.join(2 * _LOSS_SECONDS)
    return found[0] if found else "rank 0, which serves the store of the others, does not answer"


def _silent_ranks() -> str:
    """Returns which processes are gone: those that do not confirm in time that they are alive."""
    me, size = dist.get_rank(), dist.get_world_size()
    try:
        store = store_of_all()
        store.set(f"noticed/{me}", "1")
        keys = {rank: f"noticed/{rank}" for rank in range(size) if rank != me}
        deadline = time.monotonic() + _LOSS_SECONDS
        # Not `wait`, which warns on standard error when the time is over, as it will be.
        while not store.check(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(0.02)
        silent = [rank for rank, key in keys.items() if not store.check([key])]
    except RuntimeError:  # every error of torch.distributed is one
        return f"rank 0 of {size}, which served the store of the others, is gone"
    if len(silent) == 1:
        return f"rank {silent[0]} of {size} is gone"
    if not silent:
        return f"another process of the {size} of this job is gone"
    names = ", ".join(str(rank) for rank in silent)
    return f"at least one of the ranks {names} of {size} is gone"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text."""
    return (str(error).strip().splitlines() or [""])[0]


def store_of_all() -> Store:
    """Returns the store that the processes share."""
    return dist.distributed_c10d._get_default_store()
