"""(j) One push and pull with Adam over TLS and over tcp, on one host."""

from __future__ import annotations

from contextlib import ExitStack, closing

from benchmarks.context import Context
from benchmarks.exchange.cipher import cipher_exchange
from benchmarks.exchange.contender import Exchange
from benchmarks.exchange.ours import trireme_exchange
from benchmarks.pairs import Plan, interleave
from benchmarks.results import Goal, Kind, Result

SIZES = (318_080, 32 << 20)
TLS, TCP, CIPHER = "Trireme tls", "Trireme tcp", "cipher, one core"
_KINDS: dict[str, Kind] = {TLS: "trireme", TCP: "trireme", CIPHER: "limit"}


def run(context: Context) -> Result:
    """Measures the milliseconds of one exchange, one worker and one server."""
    result = Result(
        name="tls",
        title="One push and pull with Adam over TLS, one worker, one server, one host",
        unit="ms",
        higher_is_better=False,
        references=(TCP, CIPHER),
        work="exchange",
        x_label="bytes each way",
        goals=[Goal("32 MB over TLS: of tcp", "32 MB", TLS, TCP, at_most=3.0)],
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
                stack.enter_context(closing(contender))
                for contender in (
                    trireme_exchange(TLS, nbytes, burst, servers=1, transport="tls"),
                    trireme_exchange(TCP, nbytes, burst, servers=1, transport="tcp"),
                    cipher_exchange(CIPHER, nbytes, burst),
                )
            ]
            measured = interleave(contenders, plan, say=context.say)
        result.add(measured, _KINDS, condition=condition, x=nbytes)
    result.notes += [
        "TLS 1.3 with AES-256-GCM, both sides with certificates; one connection, which is open "
        "already. Worker and server encrypt and decrypt in their own processes.",
        f"{CIPHER}: one process encrypts and decrypts the bytes of both ways, one after the other. "
        "Over TLS two processes share that work.",
    ]
    return result
