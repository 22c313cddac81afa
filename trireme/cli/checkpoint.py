"""`trireme checkpoint ls|show|verify|export RUN`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from trireme.cli.parser import CHECKPOINT
from trireme.errors import CheckpointError, UsageError, suggestion
from trireme.location import RemotePath
from trireme.monitor.checkpoint_row import CheckpointRow
from trireme.monitor.numbers import size
from trireme.printable import printable


def main(arguments: Sequence[str]) -> int:
    """Runs one of the four actions."""
    given = CHECKPOINT.parser().read(arguments)
    action = _ACTIONS.get(given.action)
    if action is None:
        raise UsageError(
            f"`trireme checkpoint` cannot {given.action}{suggestion(given.action, _ACTIONS)}; "
            f"it can {', '.join(_ACTIONS)}"
        )
    return action(given)


def _list(given: Namespace) -> int:
    status = 0
    for row in describe_all(_listed(given)):
        if row.damage:
            status = 1
        what = f"DAMAGED: {row.damage}" if row.damage else f"{row.saved_at}  {size(row.nbytes)}"
        print(printable(f"{row.name}  {what}{_of(row.chain)}"))
    return status


def _of(chain: Sequence[int]) -> str:
    """Returns which saves the tables of a checkpoint are of, where they are of several."""
    if not chain:
        return ""
    return f"  tables: step {chain[0]}, changes of {', '.join(map(str, chain[1:]))}"


def describe_all(paths: Iterable[Path | RemotePath]) -> Iterator[CheckpointRow]:
    """Yields what is known of each checkpoint, which may be damaged."""
    from trireme.session.checkpoint import describe

    for path in paths:
        try:
            known = describe(path)
        except CheckpointError as error:
            yield CheckpointRow(path.name, "", 0, str(error))
        else:
            yield CheckpointRow(path.name, known.saved_at, known.nbytes, chain=known.chain)


def _show(given: Namespace) -> int:
    from trireme.session.checkpoint import describe

    description = describe(_chosen(given))
    versions = ", ".join(f"{name} {version}" for name, version in description.versions.items())
    print(f"{description.path}")
    saved = f"saved {description.saved_at} by {versions}"
    print(printable(f"  global step {description.step}, {saved}"))
    for title in ("model", "optimizer", "average", "local", "tables"):
        tensors: dict[str, tuple[str, tuple[int, ...]]] = getattr(description, title)
        if tensors:
            print(f"  {title}: {len(tensors)} tensors")
        for name, (dtype, shape) in tensors.items():
            print(printable(f"    {name}  {dtype} {list(shape)}"))
    if description.chain:
        print(f"  {_of(description.chain).strip()}")
    print(f"  {size(description.nbytes)} in all")
    return 0


def _verify(given: Namespace) -> int:
    from trireme.session.checkpoint import verify

    path = _chosen(given)
    verify(path)
    print(f"{path}: every byte is as it was written")
    return 0


def _export(given: Namespace) -> int:
    from trireme.session.checkpoint import describe, export, export_tables

    if given.state and not given.tables:
        raise UsageError("--state goes with --tables: the model's file has no optimizer state")
    path = _chosen(given)
    if given.tables:
        for file in export_tables(path, Path(given.output or "tables"), state=given.state):
            print(printable(f"{file}: a table of {path}"))
        return 0
    output = export(path, Path(given.output or "model.safetensors"))
    print(f"{output}: the model of {path}")
    tables = {key.rpartition("/")[0]: None for key in describe(path).tables}
    if tables:
        names = printable(", ".join(tables))
        print(
            f"  without the rows of its sparse tables, {names}: export them with "
            f"`trireme checkpoint export {given.run} --tables`"
        )
    return 0


_ACTIONS: dict[str, Callable[[Namespace], int]] = {
    "ls": _list,
    "show": _show,
    "verify": _verify,
    "export": _export,
}


def _listed(given: Namespace) -> list[Path | RemotePath]:
    from trireme.session.checkpoint import list_checkpoints

    paths = list_checkpoints(given.run)
    if not paths:
        raise CheckpointError(
            f"there is no checkpoint in {given.run}. Give the directory that `trireme run` named, "
            "or the program's run_dir"
        )
    return paths


def _chosen(given: Namespace) -> Path | RemotePath:
    """Returns the newest checkpoint, of --step where that is given."""
    from trireme.session.checkpoint import step_of

    listed = _listed(given)
    if given.step is None:
        return listed[-1]
    paths = {str(step_of(path)): path for path in listed}
    if given.step not in paths:
        raise CheckpointError(
            f"{given.run} has no checkpoint of step {given.step}; it has: {', '.join(paths)}"
        )
    return paths[given.step]
