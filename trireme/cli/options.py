"""From a parsed command line to settings with their origins."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from trireme.launch.settings import Option, Settings, read_file, resolve

__all__ = ["read_settings"]


def read_settings(
    given: argparse.Namespace, environ: Mapping[str, str], options: Sequence[Option]
) -> Settings:
    """Returns the settings of a job from the command line, the environment and the file.

    Args:
        given: the command line; every option is its text, or None where it is not there.
        environ: the environment.
        options: which options to look for.

    Raises:
        UsageError: a value is not what its option expects, or the file cannot be read.
    """
    named = Path(given.config) if given.config is not None else None
    file = read_file(named, Path.cwd())
    texts = {option.name: getattr(given, option.name.replace("-", "_")) for option in options}
    command_line = {name: text for name, text in texts.items() if text is not None}
    return resolve(command_line, environ, file, options)
