"""What a server tells of itself: nothing, unless a plug-in measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trireme.cluster.view import View
from trireme.plugins import Plugins
from trireme.ps.replication.log import ReplicationLog
from trireme.ps.shard.shard import Shard

Report = Mapping[str, float | str]  # a server's status: values by name


class Measures:
    """Measures nothing. All but `numbers` is used in the service's thread."""

    numbers: Mapping[str, float] = {}  # as of the last status; any thread may read them

    def applied(self, seconds: float) -> None:
        """Records how long it took to apply the updates of a step."""

    def view(self, now: float, view: View, logs: Iterable[ReplicationLog[Any]]) -> None:
        """Takes a new view; the logs are those of before, which it may replace."""

    def status(self, now: float, shard: Shard, logs: Iterable[ReplicationLog[Any]]) -> Report:
        """Returns the server's status; the logs are those of the shards that it is primary of."""
        return {}


@dataclass(frozen=True, slots=True)
class MeasuresType:
    """A kind of measures; `open` is the function from a server's index."""

    open: Callable[[int], Measures]


def measures_of(server: int) -> Measures:
    """Returns what measures a server."""
    kind = Plugins("trireme.measures", "kind of measures", MeasuresType).find("servers")
    return Measures() if kind is None else kind.open(server)
