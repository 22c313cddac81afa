"""`trireme checkpoint ls|show|verify|export RUN`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from trireme.cli.parser import COMMANDS
from trireme.errors import CheckpointError, UsageError
from trireme.monitor.numbers import size
from trireme.suggestion import suggestion

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Runs one of the four actions.

    Returns:
        0, or 1 if `ls` found a damaged checkpoint.

    Raises:
        UsageError: there is no such action.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    given = COMMANDS["checkpoint"][0]().read(arguments)
    action = _ACTIONS.get(given.action)
    if action is None:
        raise UsageError(
            f"`trireme checkpoint` cannot {given.action}{suggestion(given.action, _ACTIONS)}; "
            f"it can {', '.join(_ACTIONS)}"
        )
    return action(given)


def _list(given: Namespace) -> int:
    from trireme.session.checkpoint import describe

    status = 0
    for path in _listed(given):
        try:
            description = describe(path)
        except CheckpointError as error:
            print(f"{path.name}  DAMAGED: {error}")
            status = 1
        else:
            print(f"{path.name}  {description.saved_at}  {size(description.nbytes)}")
    return status


def _show(given: Namespace) -> int:
    from trireme.session.checkpoint import describe

    description = describe(_chosen(given))
    versions = ", ".join(f"{name} {version}" for name, version in description.versions.items())
    print(f"{description.path}")
    print(f"  global step {description.step}, saved {description.saved_at} by {versions}")
    for title in ("model", "optimizer", "average", "local"):
        tensors: dict[str, tuple[str, tuple[int, ...]]] = getattr(description, title)
        if tensors:
            print(f"  {title}: {len(tensors)} tensors")
        for name, (dtype, shape) in tensors.items():
            print(f"    {name}  {dtype} {list(shape)}")
    print(f"  {size(description.nbytes)} in all")
    return 0


def _verify(given: Namespace) -> int:
    from trireme.session.checkpoint import verify

    path = _chosen(given)
    verify(path)
    print(f"{path}: every byte is as it was written")
    return 0


def _export(given: Namespace) -> int:
    from trireme.session.checkpoint import export

    path = _chosen(given)
    output = export(path, Path(given.output or "model.safetensors"))
    print(f"{output}: the model of {path}")
    return 0


_ACTIONS: dict[str, Callable[[Namespace], int]] = {
    "ls": _list,
    "show": _show,
    "verify": _verify,
    "export": _export,
}


def _listed(given: Namespace) -> list[Path]:
    """Returns the checkpoints of the run directory, oldest first; at least one."""
    from trireme.session.checkpoint import list_checkpoints

    paths = list_checkpoints(given.run)
    if not paths:
        raise CheckpointError(
            f"there is no checkpoint in {given.run}. Give the directory that `trireme run` named, "
            "or the program's run_dir"
        )
    return paths


def _chosen(given: Namespace) -> Path:
    """Returns the checkpoint of --step; the newest without it."""
    from trireme.session.checkpoint import step_of

    paths = _listed(given)
    if given.step is None:
        return paths[-1]
    for path in paths:
        if str(step_of(path)) == given.step:
            return path
    steps = ", ".join(str(step_of(path)) for path in paths)
    raise CheckpointError(f"{given.run} has no checkpoint of step {given.step}; it has: {steps}")
