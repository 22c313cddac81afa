"""Runs programs one after the other, each in a process forked from one that has imported much."""

from __future__ import annotations

import json
import os
import runpy
import sys

import sklearn.datasets  # type: ignore[import-untyped]  # noqa: F401
import torch._dynamo  # noqa: F401

import trireme.session.session  # noqa: F401


def main() -> int:
    """Returns how many of the programs failed."""
    failed = 0
    for command in json.loads(sys.argv[1]):
        child = os.fork()
        if child == 0:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
            return 0
        _, status = os.waitpid(child, 0)
        if status:
            print(f"{command[0]} ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
