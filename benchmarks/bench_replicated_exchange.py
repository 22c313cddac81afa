"""(l) One push and pull with Adam on two servers, each shard on both or on one, on one host."""

from __future__ import annotations

from contextlib import ExitStack, closing

from benchmarks.cluster import Transport
from benchmarks.context import Context
from benchmarks.exchange.contender import Exchange
from benchmarks.exchange.ours import trireme_exchange
from benchmarks.pairs import Plan, interleave
from benchmarks.results import Goal, Kind, Result

SIZES = (318_080, 32 << 20)
TRANSPORTS: tuple[Transport, ...] = ("shm", "tcp")


def run(context: Context) -> Result:
    """Measures the milliseconds of one exchange, one worker and two servers."""
    names = {
        (t, r): f"{t}, {r} {'copy' if r == 1 else 'copies'}" for t in TRANSPORTS for r in (1, 2)
    }
    kinds: dict[str, Kind] = dict.fromkeys(names.values(), "trireme")
    result = Result(
        name="replicated_exchange",
        title="One push and pull with Adam and copies, one worker, two servers, one host",
        unit="ms",
        higher_is_better=False,
        references=tuple(names[transport, 1] for transport in TRANSPORTS),
        work="exchange",
        x_label="bytes each way",
        goals=[
            Goal(
                f"32 MB over {t}: two copies of one", "32 MB", names[t, 2], names[t, 1], at_most=2.2
            )
            for t in TRANSPORTS
        ],
    )
    for nbytes in SIZES:
        condition = f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes / 1000:.0f} KB"
        context.say(f"  {condition}")
        burst = 0.02 if context.quick else 0.15
        plan = Plan(2, least=2)
        if not context.quick:
            plan = Plan(20, seconds=context.seconds / len(SIZES), least=5)
        with ExitStack() as stack:
            contenders: list[Exchange] = [
                stack.enter_context(
                    closing(
                        trireme_exchange(
                            name, nbytes, burst, servers=2, transport=transport, replicas=replicas
                        )
                    )
                )
                for (transport, replicas), name in names.items()
            ]
            measured = interleave(contenders, plan, say=context.say)
        result.add(measured, kinds, condition=condition, x=nbytes)
    result.notes += [
        "Two copies: each server is the primary of half of the vector and the backup of the other "
        "half. The primary sends the gradients to the backup, which applies Adam too, and answers "
        "once the backup has them."
    ]
    return result
