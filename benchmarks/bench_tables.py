"""(r) Pull and push of 100,000 rows of a sparse table, on one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.cluster import Transport
from benchmarks.context import Context
from benchmarks.exchange.contender import ForkedExchange
from benchmarks.exchange.rows import Draw, array_rows, rpc_rows, trireme_rows
from benchmarks.pairs import Plan, interleave
from benchmarks.processes import cpu_seconds
from benchmarks.results import Goal, Kind, Result
from benchmarks.table_rows import AHEAD, EXPONENT, NEVER, uniform, zipf
from trireme.ps.layout import equal_bounds
from trireme.ps.rows import Divided
from trireme.tables.keys import SLOTS, unique
from trireme.wire.shared_memory import available

TCP, SHM = "Trireme tcp", "Trireme shm"
PLAIN, AHEAD_OF = "one array", "one array, reading ahead"
RPC = "torch RPC, nn.EmbeddingBag"

ROWS, QUICK_ROWS = 10_000_000, 200_000
HOT, _BUSY_EXCHANGES = 1.2, 200

DRAWS: dict[str, Draw] = {"uniform": uniform, f"Zipf {EXPONENT}": zipf}
HOT_DRAW: Draw = partial(zipf, exponent=HOT)

_Start = Callable[[str, float, Draw, int, int], ForkedExchange]
"""Starts a contender: name, seconds of a burst, batches, rows, servers."""


@dataclass(frozen=True)
class _Entrant:
    """A contender that is started for each condition anew."""

    name: str
    kind: Kind
    start: _Start


def run(context: Context) -> Result:
    """Measures the milliseconds of one exchange: uniform and Zipf's law, and the hottest keys."""
    rows = QUICK_ROWS if context.quick else ROWS
    result = Result(
        name="tables",
        title=f"Pull and push of 100,000 keys, of {rows:,} rows of 16 float32",
        unit="ms",
        higher_is_better=False,
        references=(PLAIN, AHEAD_OF),
        work="exchange",
        goals=[
            goal
            for condition in (_condition(name, 2) for name in DRAWS)
            for goal in (
                Goal(f"{condition}: of the limit", condition, SHM, PLAIN, at_most=1.5),
                Goal(f"{condition}: reading ahead", condition, SHM, AHEAD_OF, at_most=1.5),
                Goal(f"{condition}: ahead of torch RPC", condition, SHM, RPC, at_most=1.0),
            )
        ],
    )
    share = context.seconds / (len(DRAWS) + 2)
    for name, draw in DRAWS.items():
        _measure(context, result, _entrants(), name, draw, rows, 2, share)
    ours = [each for each in _entrants() if each.name == SHM]
    for servers in (2, 4):
        _measure(context, result, ours, f"Zipf {HOT}", HOT_DRAW, rows, servers, share)
    result.notes += [
        f"{PLAIN}: the limit: one process and no wire; the same deduplication, then plain loops "
        "gather and update the rows of one flat array, whose row numbers are the keys: nothing is "
        f"searched for. {AHEAD_OF}: the same loops ask for each row's memory 16 rows before they "
        "use it, as those of Trireme's tables do.",
        f"{RPC}: a sparse module at each server; torch's Adagrad has a number for each column.",
        "Processor time includes drawing the batches, which the milliseconds do not.",
    ]
    return result


def _condition(name: str, servers: int) -> str:
    return f"{name}, {servers} servers"


def _entrants() -> list[_Entrant]:
    found = [
        _Entrant(TCP, "trireme", partial(_ours, "tcp")),
        _Entrant(PLAIN, "limit", partial(_array, NEVER)),
        _Entrant(AHEAD_OF, "limit", partial(_array, AHEAD)),
        _Entrant(RPC, "peer", _rpc),
    ]
    return [_Entrant(SHM, "trireme", partial(_ours, "shm")), *found] if available() else found


def _ours(
    transport: Transport, name: str, burst: float, draw: Draw, rows: int, servers: int
) -> ForkedExchange:
    return trireme_rows(name, burst, draw, rows, servers=servers, transport=transport)


def _array(
    ahead: int, name: str, burst: float, draw: Draw, rows: int, servers: int
) -> ForkedExchange:
    return array_rows(name, burst, draw, rows, ahead=ahead)


def _rpc(name: str, burst: float, draw: Draw, rows: int, servers: int) -> ForkedExchange:
    return rpc_rows(name, burst, draw, rows, servers=servers)


def _measure(
    context: Context,
    result: Result,
    entrants: Sequence[_Entrant],
    name: str,
    draw: Draw,
    rows: int,
    servers: int,
    seconds: float,
) -> None:
    condition = _condition(name, servers)
    context.say(f"  {condition}")
    plan = Plan(2, least=2) if context.quick else Plan(15, seconds=seconds, least=3)
    kinds = {entrant.name: entrant.kind for entrant in entrants}
    contenders: list[ForkedExchange] = []
    failed: dict[str, str] = {}
    try:
        for entrant in entrants:
            try:
                contenders.append(entrant.start(entrant.name, 0.1, draw, rows, servers))
            except (RuntimeError, TimeoutError, OSError) as error:
                failed[entrant.name] = f"{type(error).__name__}: {error}"
        measured = interleave(contenders, plan, say=context.say)
        measured.failed.update(failed)
        result.add(measured, kinds, condition=condition)
        if len(entrants) == 1 and contenders and contenders[0].name in measured.samples:
            result.notes.append(_busiest(condition, contenders[0], draw, rows, servers))
    finally:
        for contender in contenders:
            contender.close()


def _busiest(condition: str, contender: ForkedExchange, draw: Draw, rows: int, servers: int) -> str:
    """Returns how much more than its part the busiest server has to do, as a line."""
    before = [cpu_seconds([pid]) for pid in contender.server_pids]
    contender.exchange(_BUSY_EXCHANGES)
    pids = contender.server_pids
    spent = [cpu_seconds([pid]) - was for pid, was in zip(pids, before, strict=True)]
    batch = draw(np.random.default_rng(3), rows)
    bounds = equal_bounds(SLOTS, servers)
    touches, keys = (np.diff(Divided.of(each, bounds).ends) for each in (batch, unique(batch)[0]))
    shares = (max(each) / sum(each) for each in (touches, keys, spent))
    of_touches, of_keys, of_time = (f"{share:.1%}" for share in shares)
    return (
        f"{condition}: {keys.sum():,} of 100,000 keys differ, and each of these travels once. The "
        f"busiest server has {of_touches} of the keys as they are drawn, {of_keys} of those that "
        f"travel, and {of_time} of the servers' processor time; an equal part is {1 / servers:.1%}."
    )
