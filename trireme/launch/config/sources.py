"""Reads the configuration of a job from command line, environment and file, in this order."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trireme.errors import ConfigurationError, UsageError, suggestion
from trireme.files import open_regular
from trireme.job_config import COMMAND_LINE, JobConfig, Option
from trireme.launch.engines import all_options
from trireme.launch.hooks import check_hooks

OTHER_VARIABLES = ("TRIREME_TASK", "TRIREME_SECRET", "TRIREME_LAUNCH")
"""The variables that are read from the environment and are no options."""

_PREFIX = "TRIREME_"
# `WORKRS` and `WORKERS` are 0.92 alike; `DATA`, which is no option, and `TASK` are 0.5
_ALIKE = 0.75


def read_config(
    command_line: Mapping[str, str | None],
    environ: Mapping[str, str],
    file: tuple[str, Mapping[str, str]] | None,
    options: Sequence[Option] | None = None,
    *,
    given_by: str = COMMAND_LINE,
) -> JobConfig:
    """Returns the configuration, with each value's origin."""
    _check_variables(environ)
    origin, file_values = file if file is not None else ("", {})
    values: dict[str, Any] = {}
    origins = {}
    for option in all_options() if options is None else options:
        for source, text in (
            (given_by, command_line.get(option.field)),
            (f"environment {option.variable}", environ.get(option.variable) or None),
            (f"file {origin}", file_values.get(option.field)),
        ):
            if text is not None:
                values[option.field] = option.read(text, source)
                origins[option.field] = source
                break
    check_hooks({**command_line, **file_values, **origins})
    return JobConfig().with_values(values, origins)


def _check_variables(environ: Mapping[str, str]) -> None:
    known = [*(option.variable for option in all_options()), *OTHER_VARIABLES]
    # Without the common prefix, which would make any two names similar.
    words = [each.removeprefix(_PREFIX) for each in known]
    for name in environ:
        if not name.startswith(_PREFIX) or name in known:
            continue
        close = difflib.get_close_matches(name.removeprefix(_PREFIX), words, n=1, cutoff=_ALIKE)
        if close:
            raise UsageError(
                f"the environment sets {name}, which is no option (did you mean "
                f"{_PREFIX}{close[0]}?): correct it, or unset it"
            )


def read_file(
    named: str | None = None, directory: Path | None = None
) -> tuple[str, dict[str, str]] | None:
    """Reads the configuration file: the named one, else the one of the directory.

    The directory's file is `trireme.toml`, else the table `[tool.trireme]` of `pyproject.toml`.
    """
    if named is not None:
        return named, _options(Path(named), _load(Path(named)))
    directory = directory or Path.cwd()
    own, project = directory / "trireme.toml", directory / "pyproject.toml"
    if own.is_file():
        return own.name, _options(own, _load(own))
    if project.is_file():
        tool = _load(project).get("tool", {})
        table = tool.get("trireme") if isinstance(tool, dict) else None
        if isinstance(table, dict):
            return project.name, _options(project, table)
    return None


def _load(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            return tomllib.load(file)
    except (OSError, ValueError, RecursionError) as error:  # long numbers, deep lists
        raise ConfigurationError(f"the configuration {path} cannot be read: {error}") from error


def _options(path: Path, table: Mapping[str, Any]) -> dict[str, str]:
    known = {option.name: option.field for option in all_options()}
    file_values = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in known:
            raise ConfigurationError(
                f"{path} sets {key}, which is no option{suggestion(name, known)}"
            )
        file_values[known[name]] = str(value)
    return file_values
