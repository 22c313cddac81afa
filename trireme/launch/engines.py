"""The engines that `--on` names: where the tasks of a job run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from trireme.errors import ConfigurationError, UsageError
from trireme.job_config import (
    COMMAND_LINE,
    LAUNCH_CALL,
    OPTIONS,
    JobConfig,
    Option,
    declared,
    field_of,
)
from trireme.launch.hooks import PluginOptions, with_hooks
from trireme.plugins import Plugins

_O = TypeVar("_O", bound=msgspec.Struct)


class NoOptions(msgspec.Struct, frozen=True):
    """The options of an engine that has none."""


@dataclass(frozen=True, slots=True)
class EngineType:
    """An engine. Its module should import fast: `trireme run --help` imports it.

    Attributes:
        summary: where tasks run, for the help of `--on`.
        run: the function that runs a job to its end and returns its exit status, as
            `package.module:function`; see `trireme.launch.local.run_local`. It is imported when
            the job starts.
        options: its own options, each a field with a default and an `Option`, as in `JobConfig`.
            The field `address` of the engine `ray` is the option `--ray-address`.
        check: raises `UsageError` for a configuration with which the engine cannot run.
        one_host: whether all tasks are on the launcher's host and see its files.
    """

    summary: str
    run: str
    options: type[msgspec.Struct] = NoOptions
    check: Callable[[JobConfig], object] = lambda config: None
    one_host: bool = False

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self.options):
            if field.default is msgspec.NODEFAULT:
                raise TypeError(f"{self.options.__name__}.{field.name} has no default")


ENGINES = Plugins("trireme.engines", "engine", EngineType)  # every installed engine

LOCAL = EngineType("this host", "trireme.launch.local:run_local", one_host=True)


def all_options() -> tuple[Option, ...]:
    """Returns every option of a job, then those of the installed hooks and engines."""
    engines = ENGINES.all()
    where = "; ".join(f"{name}: {engine.summary}" for name, engine in engines.items())
    listed = (
        replace(option, help=f"where tasks run: {where} (default local)")
        if option.field == "on"
        else option
        for option in OPTIONS
    )
    return (*listed, *_with_engines().options)


def _with_engines() -> PluginOptions:
    found = with_hooks()
    for name, engine in ENGINES.all().items():
        found.add(ENGINES, name, declared(engine.options, engine=name))
    return found


def engine_options(config: JobConfig, kind: type[_O]) -> _O:
    """Returns the options of the engine on which a job runs."""
    prefix = f"{field_of(config.launch.on)}_"
    own = declared(kind, engine=config.launch.on)
    return kind(**{each.field.removeprefix(prefix): config.value(each) for each in own})


def check_engine(config: JobConfig) -> EngineType:
    """Checks the options about where tasks run, and returns the engine."""
    given = {
        field for field, origin in config.origins.items() if origin in (COMMAND_LINE, LAUNCH_CALL)
    }
    on = config.launch.on
    if "certs" in given:
        raise UsageError(
            "--certs is for tasks that are started by hand: `trireme run` makes certificates "
            "itself, for tasks on several hosts and with --tls; leave it out"
        )
    try:
        engine = ENGINES.load(on)
    except ConfigurationError as error:
        raise ConfigurationError(f"on is {on} ({config.origin('on')}): {error}") from error
    if (refused := _with_engines().refused.get((ENGINES.group, on))) is not None:
        raise refused
    for option in all_options():
        if option.engine not in ("", on) and option.field in given:
            raise UsageError(f"--{option.name} is of another engine: add --on {option.engine}")
    if engine.one_host and "allow_plaintext" in given:
        several = " or ".join(name for name, each in ENGINES.all().items() if not each.one_host)
        raise UsageError(
            "--allow-plaintext is for jobs on several hosts, and all tasks of this one are on "
            f"this host: leave it out{several and f', or add --on {several}'}"
        )
    engine.check(config)
    return engine
