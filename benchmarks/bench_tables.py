"""(r) Pull and push of 100,000 rows of a sparse table, on one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.cluster import Transport
from benchmarks.context import Context
from benchmarks.exchange.contender import Exchange, ForkedExchange
from benchmarks.exchange.rows import array_rows, rpc_rows, trireme_rows
from benchmarks.exchange.tensorflow_rows import tensorflow_rows
from benchmarks.key_draws import EXPONENT, Draw, draw_by
from benchmarks.pairs import Plan, interleave
from benchmarks.processes import cpu_seconds
from benchmarks.results import Goal, Kind, Result
from benchmarks.table_rows import AHEAD, NEVER
from trireme.ps.layout import equal_bounds
from trireme.tables.job.requests import slots_of_shard
from trireme.tables.keys import SLOTS, slots_of, unique
from trireme.wire.transport import local_memory

TCP, SHM = "Trireme tcp", "Trireme shm"
PLAIN, AHEAD_OF = "one array", "one array, reading ahead"
RPC, TENSORFLOW = "torch RPC, nn.EmbeddingBag", "TensorFlow's servers"

ROWS, QUICK_ROWS = 10_000_000, 200_000
HOT, _BUSY_EXCHANGES = 1.2, 200

EXPONENTS = {"uniform": None, f"Zipf {EXPONENT}": EXPONENT}

_Start = Callable[[str, float, float | None, int, int], Exchange]
"""Starts a contender: name, seconds of a burst, exponent of the keys' law, rows, servers."""


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
            for condition in (_condition(name, 2) for name in EXPONENTS)
            for goal in (
                Goal(f"{condition}: of the limit", condition, SHM, PLAIN, at_most=1.5),
                Goal(f"{condition}: reading ahead", condition, SHM, AHEAD_OF, at_most=1.5),
                Goal(f"{condition}: ahead of torch RPC", condition, SHM, RPC, at_most=1.0),
                Goal(f"{condition}: ahead of TensorFlow", condition, SHM, TENSORFLOW, at_most=1.0),
            )
        ],
    )
    entrants = _entrants()
    ours = [each for each in entrants if each.name == SHM]
    if (python := context.peers.python("tensorflow")) is None:
        result.skipped.append(f"{TENSORFLOW}: no environment (`make bench-peers`)")
    else:
        entrants.append(_Entrant(TENSORFLOW, "peer", partial(_tensorflow, python, context.scratch)))
    share = context.seconds / (len(EXPONENTS) + 2)
    for name, exponent in EXPONENTS.items():
        _measure(context, result, entrants, name, exponent, rows, 2, share)
    for servers in (2, 4):
        _measure(context, result, ours, f"Zipf {HOT}", HOT, rows, servers, share)
    result.notes += [
        f"{PLAIN}: the limit: one process and no wire; the same deduplication, then plain loops "
        "gather and update the rows of one flat array, whose row numbers are the keys: nothing is "
        f"searched for. {AHEAD_OF}: the same loops ask for each row's memory 16 rows before they "
        "use it, as those of Trireme's tables do.",
        f"{RPC}: a sparse module at each server; torch's Adagrad has a number for each column.",
        f"{TENSORFLOW}: a compat.v1 job of one worker. A variable is divided among the servers by "
        "`fixed_size_partitioner`; `tf.unique`, `embedding_lookup` and its gradient, and "
        "`ResourceSparseApplyAdagrad`, which has a number for each column, without "
        "`AdagradOptimizer`'s second search for keys that repeat. Rows and gradients stay in the "
        "worker's graph.",
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
    own = [] if local_memory() is None else [_Entrant(SHM, "trireme", partial(_ours, "shm"))]
    return [*own, *found]


def _ours(
    transport: Transport, name: str, burst: float, exponent: float | None, rows: int, servers: int
) -> Exchange:
    draw = draw_by(exponent)
    return trireme_rows(name, burst, draw, rows, servers=servers, transport=transport)


def _array(
    ahead: int, name: str, burst: float, exponent: float | None, rows: int, servers: int
) -> Exchange:
    return array_rows(name, burst, draw_by(exponent), rows, ahead=ahead)


def _rpc(name: str, burst: float, exponent: float | None, rows: int, servers: int) -> Exchange:
    return rpc_rows(name, burst, draw_by(exponent), rows, servers=servers)


def _tensorflow(
    python: Path,
    scratch: Path,
    name: str,
    burst: float,
    exponent: float | None,
    rows: int,
    servers: int,
) -> Exchange:
    return tensorflow_rows(name, burst, python, scratch, rows, servers=servers, exponent=exponent)


def _measure(
    context: Context,
    result: Result,
    entrants: Sequence[_Entrant],
    name: str,
    exponent: float | None,
    rows: int,
    servers: int,
    seconds: float,
) -> None:
    condition = _condition(name, servers)
    context.say(f"  {condition}")
    plan = Plan(2, least=2) if context.quick else Plan(15, seconds=seconds, least=3)
    kinds = {entrant.name: entrant.kind for entrant in entrants}
    contenders: list[Exchange] = []
    failed: dict[str, str] = {}
    try:
        for entrant in entrants:
            try:
                contenders.append(entrant.start(entrant.name, 0.1, exponent, rows, servers))
            except (RuntimeError, TimeoutError, OSError) as error:
                failed[entrant.name] = f"{type(error).__name__}: {error}"
        measured = interleave(contenders, plan, say=context.say)
        measured.failed.update(failed)
        result.add(measured, kinds, condition=condition)
        for only in contenders[:1] if len(entrants) == 1 else ():
            if isinstance(only, ForkedExchange) and only.name in measured.samples:
                draw = draw_by(exponent)
                result.notes.append(_busiest(condition, only, draw, rows, servers))
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
    starts = [slots_of_shard(bounds, shard)[0] for shard in range(servers)]
    drawn = [slots_of(each) for each in (batch, unique(batch)[0])]
    touches, keys = (np.histogram(each, [*starts, SLOTS])[0] for each in drawn)
    shares = (max(each) / sum(each) for each in (touches, keys, spent))
    of_touches, of_keys, of_time = (f"{share:.1%}" for share in shares)
    return (
        f"{condition}: {keys.sum():,} of 100,000 keys differ, and each of these travels once. The "
        f"busiest server has {of_touches} of the keys as they are drawn, {of_keys} of those that "
        f"travel, and {of_time} of the servers' processor time; an equal part is {1 / servers:.1%}."
    )
