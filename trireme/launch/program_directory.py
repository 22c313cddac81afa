"""One run directory for a job, where its program names one and the launch does not.

The launcher needs a directory before the program has begun: `runs/NAME`, after the script. As soon
as the first worker has named the program's own, links there lead to what the launcher and the tasks
write. When the job has ended, and no file is open any more, all of it moves into the program's, and
`runs/NAME` becomes a link. So a job is found by either name at any time.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from trireme.files import write_atomically
from trireme.launch.config.secret import SECRET_FILE
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.run_directory import CERTIFICATE, LOCK, RECORD, is_running

_NAMED = "run_dir"
_FOLDERS = ("logs", "records", "traces")
_OURS = {_NAMED, RECORD, LOCK, SECRET_FILE, CERTIFICATE, *_FOLDERS}
"""What a launcher and its tasks write. A directory with anything else in it stays as it is."""

_MARK = "/."  # the end of a link's target that tells our links from a user's


def name_run_dir(task: TaskConfig, run_dir: Path | None) -> None:
    """Tells the launcher of this host the run directory that the program has named."""
    if task.records is None or run_dir is None or task.config.output.run_dir is not None:
        return
    if (task.role, task.index, task.group.rank) == ("worker", 0, 0):
        file = Path(task.records).parent / _NAMED
        with suppress(OSError):  # a full disk: the job has two directories then
            write_atomically(file, os.fsencode(run_dir.resolve()))


def unlink_name(path: Path) -> None:
    """Removes the link to an ended job's directory that `path` is, if this module has made it."""
    with suppress(OSError):
        if os.readlink(path).endswith(_MARK) and not is_running(path):
            path.unlink()


def forget_named(path: Path) -> None:
    """Forgets what the program of an earlier job in this directory has named."""
    with suppress(OSError):
        (path / _NAMED).unlink()


def link_named(path: Path) -> Path | None:
    """Links what is in a launcher's directory into the one that the program has named."""
    with suppress(OSError):
        named = Path(os.fsdecode((path / _NAMED).read_bytes()))
        (path / _NAMED).unlink()
        ours = (named / LOCK).resolve() == (path / LOCK).resolve()  # links of a killed launcher
        if named == path.resolve() or (is_running(named) and not ours):
            return None
        named.mkdir(parents=True, exist_ok=True)
        here = os.path.relpath(path.resolve(), named)
        for entry in (RECORD, LOCK):
            link = named / f".{entry}.{secrets.token_hex(4)}"
            link.symlink_to(f"{here}/{entry}")
            link.replace(named / entry)
        for entry in _FOLDERS:
            with suppress(FileExistsError):  # of an earlier job
                (named / entry).symlink_to(f"{here}/{entry}")
        return named
    return None


def move_into(path: Path, named: Path) -> None:
    """Moves an ended job's files into the directory that its program has named, and links to it.

    A directory in which other files are stays where it is, and the links in the other one too.
    """
    with suppress(OSError):
        if path.is_symlink() or {*os.listdir(path)} - _OURS:
            return
        for folder in _FOLDERS:
            if (named / folder).is_symlink():
                (named / folder).unlink()
        entries = sorted(path.rglob("*"), reverse=True)  # files before their directories
        for file in [each for each in entries if each.is_file()]:
            _move(file, named / file.relative_to(path))
        for folder_path in [each for each in entries if each.is_dir()]:
            folder_path.rmdir()
        path.rmdir()
        path.symlink_to(os.path.relpath(named, path.parent.resolve()) + _MARK)


def _move(file: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    if file.parent.name in ("logs", "records") and target.exists():  # of an earlier job
        with target.open("ab") as earlier, file.open("rb") as newer:
            shutil.copyfileobj(newer, earlier)
        file.unlink()
    else:
        if target.is_symlink():
            target.unlink()
        shutil.move(file, target)
