from __future__ import annotations

from trireme.dashboards.totals import server_rows
from trireme.printable import size
from trireme.records.records import Begin, Record, Start


def start(name: str, time: float, *statuses: dict[str, float | str]) -> Start:
    begin = Begin(task=name, job="abc", time=time, host="here", pid=1)
    records = [Record(time=time + 1 + at, status=status) for at, status in enumerate(statuses)]
    return Start(begin, records)


def held(primary: str, backup: str = "", **more: float | str) -> dict[str, float | str]:
    return {"primary_of": primary, "share": 0.5, "backup_of": backup, "life": 0, **more}


TOOK = {"takeovers": 1, "took_over": "shard 0 from ps:0"}
STARTS = [
    start("ps:0", 100.0, held("0", "1", log_entries=10, log_bytes=1000.0, memory_bytes=5.0)),
    start("ps:0", 110.0, held("", "0, 1", log_entries=4, log_bytes=400.0, memory_bytes=3.0)),
    start(
        "ps:1",
        100.5,
        held("1", "0"),
        held("0, 1", took_over_seconds=0.25, **TOOK),
        held("0, 1", took_over_seconds=1.25, **TOOK, log_entries=7),
    ),
    start("worker:0", 99.5, {"global_step": 5}),
]


def test_the_starts_of_a_server_are_added() -> None:
    first, second = server_rows(STARTS)
    assert first == ("ps:0", "here", "(0, 1)", "2", "0", "14", size(1400.0), size(5.0))
    assert second == ("ps:1", "here", "0, 1 50%", "1", "1", "7", size(0.0), size(0.0))


def test_a_run_without_servers_has_none() -> None:
    assert not list(server_rows(STARTS[3:]))
