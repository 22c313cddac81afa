"""The hooks that options of the launch add to the sessions of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trireme.errors import ConfigurationError
from trireme.job_config import OPTIONS, JobConfig, Option, field_of
from trireme.plugins import Plugins

RESERVED = (
    *("help", "config", "dry-run", "task", "secret", "launch"),
    *("job-name", "task-index", "task-id", "ps-hosts", "worker-hosts", "sync-replicas"),
    *("coordinator", "coordinator-host", "secret-file", "address-file", "journal"),
)
"""What commands and the environment have beside the options of a job."""


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


LAUNCH_HOOKS = Plugins("trireme.hooks", "hook", LaunchHook)  # every installed one


@dataclass(slots=True)
class PluginOptions:
    """The options of plug-ins. One whose name is there already is left out, and its plug-in noted.

    Attributes:
        options: those with names of their own.
        refused: why a plug-in cannot be used, by its group and name.
    """

    options: list[Option] = field(default_factory=list)
    refused: dict[tuple[str, str], ConfigurationError] = field(default_factory=dict)
    _owners: dict[str, Callable[[], str]] = field(
        default_factory=lambda: dict.fromkeys(
            (*RESERVED, *(name for option in OPTIONS for name in option.names)),
            lambda: "Trireme itself",
        )
    )

    def add(self, plugins: Plugins[Any], name: str, options: Iterable[Option]) -> None:
        """Adds the options of a plug-in."""
        for option in options:
            taken = sorted(option.names & self._owners.keys())
            if taken:
                why = f"has an option --{taken[0]}, which {self._owners[taken[0]]()} has already"
                self.refused[plugins.group, name] = plugins.refused(name, why)
                continue
            self.options.append(option)
            self._owners |= dict.fromkeys(option.names, partial(plugins.described, name))


def with_hooks() -> PluginOptions:
    """Returns the options that add hooks."""
    found = PluginOptions()
    for name, hook in LAUNCH_HOOKS.all().items():
        found.add(LAUNCH_HOOKS, name, [replace(hook.option, field=field_of(name))])
    return found


def check_hooks(given: Mapping[str, object]) -> None:
    """Checks that no option which was given, by its field, is also that of a hook."""
    for (_, name), error in with_hooks().refused.items():
        if given.get(field_of(name)):
            raise error


def launched_hooks(config: JobConfig) -> tuple[Any, ...]:
    """Returns the hooks that the launch of a job adds."""
    given = {name: config.plugin_options.get(field_of(name)) for name in LAUNCH_HOOKS}
    return tuple(
        LAUNCH_HOOKS.imported(name, "make")(value)
        for name, value in given.items()
        if value is not None and LAUNCH_HOOKS.load(name).make
    )
