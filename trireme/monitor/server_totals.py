"""Totals of a run for each server, and the failovers, from the records of its tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trireme.monitor.numbers import number_of
from trireme.monitor.placement import held
from trireme.monitor.records import Start


@dataclass(frozen=True, slots=True)
class ServerTotals:
    """The totals of one server over all its starts."""

    name: str
    host: str
    starts: int
    held: str
    takeovers: int
    entries: int
    nbytes: float
    memory: float


def server_totals(starts: Sequence[Start]) -> list[ServerTotals]:
    """Returns the totals of each server with records."""
    by_name: dict[str, list[Start]] = {}
    for start in _servers(starts):
        by_name.setdefault(start.begin.task, []).append(start)
    return [_totals(name, own) for name, own in by_name.items()]


def failovers(starts: Sequence[Start]) -> list[tuple[float, str]]:
    """Returns the takeovers and rollbacks, each with the seconds since the first record began."""
    servers = [*_servers(starts)]
    began = min((start.begin.time for start in starts), default=0.0)
    found = [event for start in servers for event in _takeovers(start)]
    found += _rollbacks(servers)
    return [(time - began, text) for time, text in sorted(found)]


def _servers(starts: Sequence[Start]) -> Iterator[Start]:
    for start in starts:
        if start.begin.task.startswith("ps:") and start.records:
            yield start


def _totals(name: str, starts: Sequence[Start]) -> ServerTotals:
    last = [start.records[-1].status for start in starts]
    memory = (number_of(each.status, "memory_bytes") for start in starts for each in start.records)
    return ServerTotals(
        name=name,
        host=starts[-1].begin.host,
        starts=len(starts),
        held=held(last[-1]),
        takeovers=int(sum(number_of(status, "takeovers") for status in last)),
        entries=int(sum(number_of(status, "log_entries") for status in last)),
        nbytes=sum(number_of(status, "log_bytes") for status in last),
        memory=max(memory),
    )


def _takeovers(start: Start) -> Iterator[tuple[float, str]]:
    known = 0.0
    for record in start.records:
        takeovers = number_of(record.status, "takeovers")
        if takeovers > known:
            ago = number_of(record.status, "took_over_seconds")
            text = f"{start.begin.task} took over {record.status.get('took_over', '')}"
            yield record.time - ago, text
        known = takeovers


def _rollbacks(servers: Sequence[Start]) -> Iterator[tuple[float, str]]:
    """Yields each rollback once, by the first server that has noted it."""
    lives: dict[int, float] = {}
    for record in (record for start in servers for record in start.records):
        life = int(number_of(record.status, "life"))
        lives[life] = min(record.time, lives.get(life, record.time))
    for life, time in lives.items():
        if life:
            yield time, "all copies of a shard were lost: the job went back"
