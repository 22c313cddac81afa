"""What installed packages add to Trireme, and what it adds itself: entry points.

A package adds a command, an engine, a transport, ... by an entry point in its `pyproject.toml`:

    [project.entry-points."trireme.commands"]
    size = "trireme_size:SIZE"

The group says which kind of plug-in it is, and so of which class the object must be. Those of
Trireme itself are in its own `pyproject.toml`. Names are read from the metadata of what is
installed, once a process; an object is imported when it is first needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distribution,
    entry_points,
)
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

from trireme.errors import ConfigurationError, UsageError, suggestion

_T = TypeVar("_T")

_OWN = "trireme-train"  # the distribution of this package

_EXTRAS: dict[str, dict[str, str]] = {
    f"trireme.{group}": dict(word.split("=") for word in words.split())
    for group, words in {
        "stores": "s3=s3 s3a=s3 gs=gs gcs=gs abfs=abfs abfss=abfs az=abfs memory=remote",
        "backends": "graph=graph local=averaging parallel=parallel",
        "commands": (
            "certs=tls checkpoint=checkpoints doctor=doctor graph=graph "
            "report=dashboards scale=control slurm=slurm status=screen stop=control "
            "task=environments top=screen verify=verification"
        ),
        "encryption": "tls=tls",
        "engines": "ray=ray slurm=slurm spark=spark",
        "exporters": "prometheus=prometheus",
        "environments": "launchers=environments",
        "hooks": "check-every=corruption on-corruption=corruption profile=tracking",
        "observers": (
            "corruption=corruption curves=dashboards labels=advice lost-updates=advice "
            "other-optimizers=advice schedules=advice served-optimizer=advice "
            "verification=verification written-constants=writes"
        ),
        "kernels": "fused=kernels",
        "measures": "servers=screen",
        "server_parts": "corruption=corruption tracer=tracking",
        "packing": "codecs=compression",
        "records": "jsonl=records",
        "orders": "samplers=samplers",
        "streams": "streams=streams",
        "extensions": "tables=tables",
        "templates": "fork=fork",
        "writes": "watched=writes",
        "transports": "shm=shm tls=tls",
        "strategies": (
            "allreduce=parallel fsdp=parallel graph=graph pipeline=parallel tensor=parallel "
            "averaging=averaging diloco=averaging"
        ),
    }.items()
}
"""What Trireme's own plug-ins add, as NAME=EXTRA: an error names the extra that installs it."""

_CORE = ("trireme.commands", "trireme.engines", "trireme.strategies", "trireme.transports")
"""Groups in which the core itself has something."""


class Plugins(Generic[_T]):
    """All plug-ins of one kind, by name."""

    def __init__(self, group: str, what: str, kind: type[_T]) -> None:
        self.group = group
        self._what = what
        self._kind = kind

    def names(self) -> list[str]:
        """Returns the names of the installed ones, sorted, without importing any of them."""
        return list(_names(self.group))

    def __iter__(self) -> Iterator[str]:
        """Iterates over `names()`."""
        return iter(self.names())

    def __contains__(self, name: str) -> bool:
        return name in _names(self.group)

    def load(self, name: str) -> _T:
        """Returns the plug-in of a name, or raises `ConfigurationError`."""
        loaded = _load(self.group, self._what, name)
        if not isinstance(loaded, self._kind):
            raise self.refused(name, f"is no {self._kind.__name__}")
        return loaded

    def imported(self, name: str, attribute: str) -> Any:
        """Imports what an attribute of a plug-in names, as `package.module:name`."""
        path = getattr(self.load(name), attribute)
        try:
            return resolve_name(path)
        except (Exception, SystemExit) as error:  # whatever another's module raises
            why = f"{type(error).__name__}: {error}"
            raise self.refused(name, f"names {attribute}={path!r}, of which comes {why}") from error

    def refused(self, name: str, why: str) -> ConfigurationError:
        """Returns the error that a plug-in is not what its entry point must name."""
        return _refused(self.group, self._what, name, why)

    def described(self, name: str) -> str:
        """Returns the plug-in of a name in words, with its distribution."""
        return f"the {self._what} {name} of {_named(_point(self.group, self._what, name))}"

    def check(self, name: str) -> None:
        """Raises `UsageError` for a name of a plug-in of Trireme that is not installed here."""
        if name not in self and (extra := _EXTRAS.get(self.group, {}).get(name)) is not None:
            raise UsageError(not_installed(f"the {self._what} {name}", extra))

    def find(self, name: str) -> _T | None:
        """Returns the plug-in of a name; None where none of that name is installed."""
        return self.load(name) if name in self else None

    def all(self) -> dict[str, _T]:
        """Returns every installed one, by its name."""
        return {name: self.load(name) for name in self.names()}


def not_installed(what: str, extra: str) -> str:
    """Returns the message that a plug-in of Trireme is not installed here."""
    return f"{what} is in a plug-in that is not installed here: pip install '{_OWN}[{extra}]'"


def known(group: str) -> list[str]:
    """Returns the names of a group's plug-ins, of Trireme's own also those not installed here."""
    return sorted({*(point.name for point in _points(group)), *_EXTRAS.get(group, ())})


@cache
def _read() -> Any:
    """Returns all entry points: that looks at each package, and so is done once a process."""
    return entry_points()


@cache
def _points(group: str) -> tuple[EntryPoint, ...]:
    """Returns the entry points of a group."""
    points: tuple[EntryPoint, ...] = tuple(_read().select(group=group))
    own = any(point.value.startswith("trireme.") for point in points)
    if not own and group in _CORE:
        raise ConfigurationError(
            f"the installed metadata of {_OWN} have no entry points {group}: they are older than "
            "its code. Install it again: `make venv`, or pip install --no-deps -e . in its clone"
        )
    return points


@cache
def _names(group: str) -> tuple[str, ...]:
    points = _points(group)
    return tuple(sorted({point.name for point in points if not _missing(point)}))


@cache
def _load(group: str, what: str, name: str) -> Any:
    point = _point(group, what, name)
    if missing := _missing(point):
        raise ConfigurationError(
            f"the {what} {name} needs {missing}: pip install "
            f"'{_source(point).name}[{','.join(point.extras)}]'"
        )
    if not _is_formed(point):
        raise _refused(group, what, name, "is not of the form package.module:object")
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # whatever another's module raises
        why = f"cannot be imported: {type(error).__name__}: {error}"
        raise _refused(group, what, name, why) from error


def _point(group: str, what: str, name: str) -> EntryPoint:
    points = [point for point in _points(group) if point.name == name]
    if not points:
        raise ConfigurationError(_unknown(group, what, name))
    if len(points) > 1:
        both = " and ".join(sorted(_named(point) for point in points))
        raise ConfigurationError(
            f"there are two plug-ins for the {what} {name}, of {both}: uninstall one of them"
        )
    return points[0]


def _refused(group: str, what: str, name: str, why: str) -> ConfigurationError:
    point = _point(group, what, name)
    return ConfigurationError(
        f"the {what} {name} of {_named(point)}, {point.value}, {why}; mend or uninstall that "
        "package"
    )


def _unknown(group: str, what: str, name: str) -> str:
    """Returns the message about a name that no plug-in has."""
    there = sorted({point.name for point in _points(group)})
    extra = _EXTRAS.get(group, {}).get(name)
    if extra is not None:
        return not_installed(f"the {what} {name}", extra)
    text = f"there is no {what} {name}{suggestion(name, there)}: there are {', '.join(there)}"
    return f"{text}, and those of packages that you install"


def _missing(point: EntryPoint) -> str:
    """Returns the first package that a plug-in's extras ask for and that is not installed."""
    if not _is_formed(point) or not point.extras:
        return ""
    from packaging.requirements import Requirement  # takes a while, and only few plug-ins need it

    for text in _source(point).requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or not any(marker.evaluate({"extra": each}) for each in point.extras):
            continue
        try:
            distribution(requirement.name)
        except PackageNotFoundError:
            return requirement.name
    return ""


def _is_formed(point: EntryPoint) -> bool:
    return point.pattern.match(point.value) is not None


def _source(point: EntryPoint) -> Distribution:
    assert point.dist is not None  # so it is of those that `entry_points` finds
    return point.dist


def _named(point: EntryPoint) -> str:
    source = _source(point)
    return f"{source.name} {source.version}" if source.name else "a package without METADATA"
