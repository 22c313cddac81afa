"""Checks of the network: addresses of this host, ports, other hosts. Pure functions of facts."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trireme.cluster.spec import LOOPBACK
from trireme.doctor.check import Check


@dataclass(frozen=True, slots=True)
class AddressFacts:
    """The addresses of this host.

    Attributes:
        name: the host's name.
        resolved: the addresses that its name resolves to; none if it does not resolve.
        interfaces: the IP addresses of each network interface, by its name.
        outward: the address from which this host reaches other hosts; empty if it reaches none.
    """

    name: str
    resolved: tuple[str, ...]
    interfaces: Mapping[str, Sequence[str]]
    outward: str


def check_addresses(facts: AddressFacts) -> list[Check]:
    """Checks loopback, the address for other hosts, and the host's own name."""
    shown = ", ".join(
        f"{address} ({name})" for name, each in facts.interfaces.items() for address in each
    )
    own = {address for each in facts.interfaces.values() for address in each}
    checks = [Check("addresses", "ok", shown or "none")]
    if LOOPBACK not in own:
        advice = "ip link set lo up"
        found = f"this host has no {LOOPBACK}, where `trireme run` has its tasks listen"
        checks.append(Check("loopback", "problem", found, advice))
    else:
        checks.append(Check("loopback", "ok", f"tasks of `trireme run` announce {LOOPBACK}"))
    return [*checks, _check_outward(facts), _check_name(facts, own)]


def _check_outward(facts: AddressFacts) -> Check:
    if facts.outward:
        text = f"tasks that other hosts reach announce {facts.outward}"
        return Check("network", "ok", text)
    advice = "connect it, if the job is to have tasks on several hosts; otherwise nothing"
    return Check("network", "warning", "this host has no route to others", advice)


def _check_name(facts: AddressFacts, own: set[str]) -> Check:
    topic, resolved = "host name", ", ".join(facts.resolved)
    if not facts.resolved:
        advice = f"add {facts.outward or LOOPBACK} {facts.name} to /etc/hosts"
        found = f"{facts.name} resolves to no address, and torch.distributed asks for it"
        return Check(topic, "warning", found, advice)
    if not own & set(facts.resolved):
        advice = f"correct {facts.name} in /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME"
        found = f"{facts.name} is {resolved}, which is no address of this host"
        return Check(topic, "problem", found, advice)
    if facts.outward and all(ipaddress.ip_address(each).is_loopback for each in facts.resolved):
        advice = f"for process groups on several hosts map {facts.name} to {facts.outward}"
        found = f"{facts.name} is {resolved}, which other hosts cannot reach"
        return Check(topic, "warning", found, advice)
    return Check(topic, "ok", f"{facts.name} is {resolved}")


def check_port(port: int, failure: str) -> Check:
    """Checks that a task can listen at a port.

    Args:
        port: the port; 0 for one that the system chooses.
        failure: why nothing can listen there, who does, and what to do; empty if it can.
    """
    topic = f"port {port}" if port else "listening"
    if failure:
        return Check(topic, "problem", failure)
    return Check(topic, "ok", "free" if port else "the system gives ports")


@dataclass(frozen=True, slots=True)
class Reached:
    """An attempt to reach a task.

    Attributes:
        name: the task, such as `ps:0`; empty if only its address is known.
        address: its address, as `host:port`.
        seconds: how long connecting took; None if it failed.
        failure: why it failed, and what to do.
    """

    name: str
    address: str
    seconds: float | None
    failure: str = ""


def check_reached(attempt: Reached) -> Check:
    """Checks that a task can be reached from this host."""
    topic = f"{attempt.name} at {attempt.address}" if attempt.name else attempt.address
    if attempt.seconds is None:
        return Check(topic, "problem", attempt.failure)
    return Check(topic, "ok", f"reached in {attempt.seconds * 1e3:.1f} ms")
