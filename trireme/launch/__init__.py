"""Finds out which task this process is, and starts the tasks of a job.

`trireme.launch(...)` starts a job from a program: the package itself can be called.
`help(trireme.jobs.launch.launch)` explains the arguments.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

__all__: list[str] = []


class _CallablePackage(ModuleType):
    """This package, which is called as the function `trireme.jobs.launch.launch`.

    The package and the public function have one name, and an import of any module in the package
    binds that name to the package (decision 0044).
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        # By name: the function is in a layer far above.
        return importlib.import_module("trireme.jobs.launch").launch(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        """The function's, for editors and notebooks."""
        return inspect.signature(importlib.import_module("trireme.jobs.launch").launch)


sys.modules[__name__].__class__ = _CallablePackage
