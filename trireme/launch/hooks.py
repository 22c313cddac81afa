"""The hooks that options of the launch add to the sessions of a job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trireme.job_config import JobConfig, Option
from trireme.plugins import Plugins


@dataclass(frozen=True, slots=True)
class LaunchHook:
    """A hook that an option adds: `--NAME`, where NAME is that of the entry point.

    Its module should import fast: `trireme run --help` imports it.

    Attributes:
        option: the option, with the `type` of its value; without a value there is no hook.
        make: the function from the value to a `trireme.session.hooks.Hook`, as
            `package.module:function`. It is imported when a session begins. Empty where something
            else reads the option: a part of servers, or an observer, from `plugin_options`.
    """

    option: Option
    make: str = ""


LAUNCH_HOOKS = Plugins("trireme.hooks", "hook", LaunchHook)
"""Every installed one."""


def hook_options() -> tuple[Option, ...]:
    """Returns the options that add hooks."""
    return tuple(
        replace(hook.option, field=_field(name)) for name, hook in LAUNCH_HOOKS.all().items()
    )


def launched_hooks(config: JobConfig) -> tuple[Any, ...]:
    """Returns the hooks that the launch of a job adds."""
    given = {name: config.plugin_options.get(_field(name)) for name in LAUNCH_HOOKS}
    return tuple(
        LAUNCH_HOOKS.imported(name, "make")(value)
        for name, value in given.items()
        if value is not None and LAUNCH_HOOKS.load(name).make
    )


def _field(name: str) -> str:
    return name.replace("-", "_")
