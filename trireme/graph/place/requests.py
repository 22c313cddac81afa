"""The devices that a program requests for operations, as constraints of the placement."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx

from trireme.errors import ConfigurationError, suggestion
from trireme.graph.capture.scopes import check_device
from trireme.graph.capture.source import scope
from trireme.graph.place.costs import Constraints, merged
from trireme.printable import counted


@dataclass(frozen=True)
class Requests:
    """What the program requests, as far as the devices of the job can meet it."""

    constraints: Constraints
    unmet: tuple[str, ...] = ()  # a sentence for each request that the job cannot meet


def matched(graph: fx.Graph, patterns: Mapping[str, str]) -> dict[str, str]:
    """Returns the device of each node that a pattern names; the first pattern that matches decides.

    A pattern is compared with the names of the node, of its module, of the parameter, and of the
    modules around it.
    """
    for device in patterns.values():
        check_device(device)
    found: dict[str, str] = {}
    used = set[str]()
    known = set[str]()
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        names = list(_names(node))
        known.update(names)
        for pattern, device in patterns.items():
            if any(fnmatchcase(name, pattern) for name in names):
                used.add(pattern)
                found.setdefault(node.name, device)
    for pattern in patterns:
        if pattern not in used:
            raise ConfigurationError(
                f"placement {pattern!r}: the model has no module, parameter or operator of that "
                f"name{suggestion(pattern.rstrip('.*'), known)}; trireme graph lists them"
            )
    return found


def _names(node: fx.Node) -> Iterator[str]:
    yield node.name
    path = str(node.target) if node.op == "get_attr" else scope(node)
    while path:
        yield path
        path = path.rpartition(".")[0]


def resolve(
    requested: Mapping[str, str],
    together: Sequence[Sequence[str]],
    operations: Sequence[str],
    places: Sequence[str],
    *,
    parameters: Collection[str] = (),
    servers: int = 0,
    soft: bool = True,
    names: Mapping[str, str] | None = None,
) -> Requests:
    """Returns the constraints that requests for devices mean for a job."""

    def shown(found: Sequence[str]) -> str:
        first = ", ".join((names or {}).get(name, name) for name in found[:3])
        return first if len(found) <= 3 else f"{first} and {len(found) - 3} more"

    def why(device: str) -> str:
        if device.startswith("ps:") and int(device[3:]) < servers:
            return "parameter servers hold parameters only"
        beside = f" and {counted(servers, 'server')}" if servers else ""
        return f"this job has {', '.join(places)}{beside}"

    requested, overruled = _spread_over_groups(requested, together, operations)
    pinned: dict[str, str] = {}
    never: dict[str, tuple[str, ...]] = {}
    unmet: dict[str, list[str]] = {}
    for name in operations:
        device = check_device(requested[name]) if name in requested else ""
        fitting = [at for at in places if not device or at == device or at.startswith(f"{device}/")]
        on_server = device.startswith("ps:") and name in parameters
        is_met = on_server and (int(device[3:]) < servers or (not servers and soft))
        if not fitting and not is_met:
            unmet.setdefault(device, []).append(name)
        fitting = fitting or list(places)
        if len(fitting) == 1:
            pinned[name] = fitting[0]
        elif len(fitting) < len(places):
            never[name] = tuple(place for place in places if place not in fitting)
    sentences = tuple(
        f"{shown(found)} cannot be on {device}: {why(device)}" for device, found in unmet.items()
    ) + tuple(
        f"{shown(found)} cannot be on {device}: it must share a device with {shown([first])}, "
        f"which is on {requested[first]}"
        for (device, first), found in overruled.items()
    )
    if sentences and not soft:
        raise ConfigurationError(
            f"{sentences[0]}; correct the device, start the job with it, or let the operations be "
            "placed elsewhere with GraphConfig(soft=True)"
        )
    constraints = Constraints(pinned, tuple(map(tuple, together)), never)
    return Requests(constraints, sentences)


def _spread_over_groups(
    requested: Mapping[str, str], together: Sequence[Sequence[str]], operations: Sequence[str]
) -> tuple[dict[str, str], dict[tuple[str, str], list[str]]]:
    """Returns the requests with those of groups, and those that the group's first one overrules.

    Requests for servers are left as they are, and hold for no other operation.
    """
    spread = dict(requested)
    overruled: dict[tuple[str, str], list[str]] = {}
    elsewhere = {name for name in operations if requested.get(name, "ps:").startswith("ps:")}
    for group in merged(together):
        first = next((name for name in operations if name in group - elsewhere), None)
        if first is None:
            continue
        for name in sorted(each for each in group if not spread.get(each, "").startswith("ps:")):
            if requested.get(name, requested[first]) != requested[first]:
                overruled.setdefault((requested[name], first), []).append(name)
            spread[name] = requested[first]
    return spread, overruled
