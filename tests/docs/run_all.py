"""Runs programs one after the other, each in a process forked from one that has imported much."""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import runpy
import sys

import sklearn.datasets  # type: ignore[import-untyped]
import sklearn.model_selection  # type: ignore[import-untyped]  # noqa: F401
import torch._dynamo  # noqa: F401

import trireme.session.session  # noqa: F401
from trireme.launch.engines import all_options


def run(command: list[str]) -> None:
    """Runs a program as Python does."""
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # some end their jobs then; multiprocessing would not


def main() -> int:
    """Returns how many of the programs failed."""
    all_options()  # reads the entry points of all packages
    gc.freeze()  # no search for garbage in a program looks at what was imported here
    context = multiprocessing.get_context("fork")
    failed = 0
    for command in json.loads(sys.argv[1]):
        process = context.Process(target=run, args=(command,))
        process.start()
        process.join()
        if process.exitcode:
            print(f"{command[0]} ended with {process.exitcode}", file=sys.stderr)
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
