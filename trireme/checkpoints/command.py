"""`trireme checkpoint ls|show|verify|export RUN`."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from trireme.checkpoints.entry import CHECKPOINT
from trireme.errors import CheckpointError, UsageError
from trireme.files import make_directory
from trireme.location import RemotePath
from trireme.printable import printable, size
from trireme.session.checkpoint import describe, list_checkpoints, load, step_of, verify
from trireme.session.checkpoint.tensors import write_tensors_file


def main(arguments: Sequence[str]) -> int:
    """Runs one of the four actions."""
    given = CHECKPOINT.parser().read(arguments)
    return _ACTIONS[given.action](given)


def _list(given: Namespace) -> int:
    status = 0
    for path in _listed(given):
        try:
            known, _ = describe(path)
        except CheckpointError as error:
            status = 1
            print(printable(f"{path.name}  DAMAGED: {error}"))
        else:
            about = f"{known.saved_at}  {size(known.nbytes)}{_of(known.chain)}"
            print(printable(f"{path.name}  {about}"))
    return status


def _of(chain: Sequence[int]) -> str:
    if not chain:
        return ""
    return f"  tables: step {chain[0]}, changes of {', '.join(map(str, chain[1:]))}"


def _show(given: Namespace) -> int:
    path = _chosen(given)
    known, groups = describe(path)
    versions = ", ".join(f"{name} {version}" for name, version in known.versions.items())
    print(f"{path}")
    print(printable(f"  global step {known.step}, saved {known.saved_at} by {versions}"))
    for title, tensors in groups.items():
        if tensors:
            print(f"  {title}: {len(tensors)} tensors")
        for name, (dtype, shape) in tensors.items():
            print(printable(f"    {name}  {dtype} {list(shape)}"))
    if known.chain:
        print(f"  {_of(known.chain).strip()}")
    print(f"  {size(known.nbytes)} in all")
    return 0


def _verify(given: Namespace) -> int:
    path = _chosen(given)
    verify(path)
    print(f"{path}: every byte is as it was written")
    return 0


def _export(given: Namespace) -> int:
    if given.state and not given.tables:
        raise UsageError("--state goes with --tables: the model's file has no optimizer state")
    path = _chosen(given)
    if given.tables:
        from trireme.ps.extension import of_extension

        exported = of_extension("tables", "exported")
        for file in exported(path, Path(given.output or "tables"), state=given.state):
            print(printable(f"{file}: a table of {path}"))
        return 0
    output = export(path, Path(given.output or "model.safetensors"))
    print(f"{output}: the model of {path}")
    tables = {key.rpartition("/")[0]: None for key in describe(path)[1]["tables"]}
    if tables:
        names = printable(", ".join(tables))
        print(
            f"  without the rows of its sparse tables, {names}: export them with "
            f"`trireme checkpoint export {given.run} --tables`"
        )
    return 0


def export(path: Path | RemotePath, output: Path) -> Path:
    """Writes a checkpoint's model as one plain safetensors file that any tool reads."""
    data = load(path)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        make_directory(output.parent)
        write_tensors_file(partial, data.model)
        os.replace(partial, output)
    except OSError as error:
        raise CheckpointError(f"the model could not be written to {output}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return output


_ACTIONS: dict[str, Callable[[Namespace], int]] = {
    "ls": _list,
    "show": _show,
    "verify": _verify,
    "export": _export,
}


def _listed(given: Namespace) -> list[Path | RemotePath]:
    paths = list_checkpoints(given.run)
    if not paths:
        raise UsageError(
            f"there is no checkpoint in {given.run}. Give the directory that `trireme run` named, "
            "or the program's run_dir"
        )
    return paths


def _chosen(given: Namespace) -> Path | RemotePath:
    listed = _listed(given)
    if given.step is None:
        return listed[-1]
    paths = {str(step_of(path)): path for path in listed}
    if given.step not in paths:
        raise UsageError(
            f"{given.run} has no checkpoint of step {given.step}; it has: {', '.join(paths)}"
        )
    return paths[given.step]
