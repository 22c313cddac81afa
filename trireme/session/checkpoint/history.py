"""The checkpoints of a run: which there are, which is the newest good one, which may go."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from trireme.errors import CheckpointError
from trireme.session.checkpoint import durable
from trireme.session.checkpoint.format import CheckpointData, checkpoint_directory, load, verify

__all__ = ["latest", "list_checkpoints", "prune", "step_of"]

_NAME = re.compile(r"step-(\d{9,})")


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """Returns the directories of a run's checkpoints, the oldest first, whether good or damaged.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    parent = checkpoint_directory(run_dir)
    try:
        found = durable.standing(parent)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {parent} cannot be read: {error}") from error
    by_step = {int(match[1]): path for name, path in found.items() if (match := _NAME.match(name))}
    return [by_step[step] for step in sorted(by_step)]


def step_of(path: Path) -> int:
    """Returns the global step of one of `list_checkpoints`, by its name."""
    match = _NAME.search(path.name)
    if match is None:
        raise ValueError(f"{path} is not named as a checkpoint is")
    return int(match[1])


def latest(
    run_dir: str | Path, on_damaged: Callable[[Path, CheckpointError], None]
) -> CheckpointData | None:
    """Reads the newest checkpoint of a run that is good.

    Args:
        run_dir: the run's directory.
        on_damaged: told of every newer one that was passed over, and why.

    Returns:
        The checkpoint, or None if the run has none.

    Raises:
        CheckpointError: the run has checkpoints, and none is good. To begin anew in their place
            shall be somebody's decision.
    """
    paths = list_checkpoints(run_dir)
    for path in reversed(paths):
        try:
            return load(path)
        except CheckpointError as error:
            on_damaged(path, error)
    if not paths:
        return None
    raise CheckpointError(
        f"every checkpoint in {checkpoint_directory(run_dir)} is damaged ({len(paths)} of them): "
        "restore one from a copy, or move them away to begin anew"
    )


def prune(
    run_dir: str | Path,
    keep: int,
    keep_every_steps: int | None = None,
    *,
    good: Path | None = None,
    allowed: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Deletes old checkpoints of a run.

    Three kinds stay: the newest `keep`; with `keep_every_steps`, the first at or after each of its
    multiples; and, whatever the numbers say, the newest that is good.

    Args:
        run_dir: the run's directory.
        keep: how many of the newest stay, 1 or more.
        keep_every_steps: one checkpoint stays for good for each so many steps.
        good: a checkpoint known to be good, as one just written; saves verifying the newest ones.
        allowed: called before each is deleted; raises where this process may no longer do so.

    Returns:
        The checkpoints that were deleted.

    Raises:
        ValueError: `keep` is below 1.
        CheckpointError: one of them could not be deleted.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: at least one checkpoint has to stay")
    paths = list_checkpoints(run_dir)
    stay = set(paths[-keep:]) | _milestones(paths, keep_every_steps)
    doomed = [path for path in paths if path not in stay]
    if doomed and good not in stay:
        spared = next((path for path in reversed(paths) if _is_good(path)), None)
        doomed = [path for path in doomed if path != spared]
    for path in doomed:
        allowed()
        try:
            durable.remove(path)
        except OSError as error:
            raise CheckpointError(f"{path} could not be deleted: {error}") from error
    return doomed


def _milestones(paths: list[Path], every: int | None) -> set[Path]:
    if every is None:
        return set()
    first: dict[int, Path] = {}
    for path in paths:
        first.setdefault(step_of(path) // every, path)
    return {path for number, path in first.items() if number > 0}


def _is_good(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True
