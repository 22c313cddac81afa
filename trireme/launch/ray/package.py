"""Imports Ray when it is first used: everything else works without it."""

from __future__ import annotations

from typing import Any

from trireme.errors import ConfigurationError


def load_ray() -> Any:
    """Returns the package `ray`.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import ray
        import ray._private.state
        import ray.exceptions
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigurationError(
            f"--on ray needs Ray, and it cannot be imported ({error}): pip install 'ray>=2.40', "
            "here and on every node"
        ) from error
    return ray
