"""The cluster of a job that is started by hand: frozen, and checked once before anything starts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from trireme.cluster.spec import LOOPBACK, ROLES, check_address, task_name
from trireme.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The tasks of a job and their addresses, as `host:port`."""

    ps: tuple[str, ...]
    worker: tuple[str, ...]  # workers do not listen: only their number matters
    coordinator: str | None = None  # None where `ps:0` hosts it on its own port

    def __post_init__(self) -> None:
        if not self.worker:
            raise ConfigurationError("the cluster has no worker: name at least one host")
        named = [(task_name("ps", index), each) for index, each in enumerate(self.ps)]
        named += [(task_name("worker", index), each) for index, each in enumerate(self.worker)]
        if self.coordinator and self.coordinator not in self.ps[:1]:
            named.append(("coordinator:0", self.coordinator))
        holders: dict[str, str] = {}
        for name, address in named:
            check_address(name, address)
            if address in holders:
                raise ConfigurationError(
                    f"{holders[address]} and {name} both have the address {address}: "
                    "give each task its own"
                )
            holders[address] = name

    @classmethod
    def from_hosts(
        cls, ps_hosts: str, worker_hosts: str, coordinator: str | None = None
    ) -> ClusterSpec:
        """Reads the classic strings: `host:port` entries separated by commas."""
        return cls(
            ps=_split_hosts("ps_hosts", ps_hosts),
            worker=_split_hosts("worker_hosts", worker_hosts),
            coordinator=coordinator or None,
        )

    @classmethod
    def of_servers(cls, ps_hosts: str, workers: int) -> ClusterSpec:
        """Returns the cluster of servers and of so many workers without addresses."""
        ps = _split_hosts("servers", ps_hosts)
        places = (f"{LOOPBACK}:{port}" for port in itertools.count(1))
        free = (place for place in places if place not in ps)
        return cls(ps=ps, worker=tuple(itertools.islice(free, max(0, workers))))

    @property
    def coordinator_address(self) -> str:
        """The coordinator's address: its own, else that of `ps:0`; "" if there is neither."""
        return self.coordinator or next(iter(self.ps), "")

    def address(self, role: str, index: int) -> str:
        """Returns the `host:port` of a task."""
        self.check_task(role, index)
        if role == "coordinator":
            return self.coordinator_address
        return (self.ps if role == "ps" else self.worker)[index]

    def check_task(self, role: str, index: int) -> None:
        """Raises `ConfigurationError` if a role and an index name no task."""
        if role not in ROLES:
            raise ConfigurationError(
                f"there is no role {role!r}: a task is one of {', '.join(ROLES)}"
            )
        count = {"coordinator": 1, "ps": len(self.ps), "worker": len(self.worker)}[role]
        if not 0 <= index < count:
            there_are = f"{role}:0 to {role}:{count - 1}" if count > 1 else f"{role}:0 alone"
            raise ConfigurationError(
                f"{task_name(role, index)} is outside the cluster, which has "
                f"{there_are if count else f'no {role} at all'}: correct the task's index, or "
                f"name its host in the list of {role} hosts"
            )


@dataclass(frozen=True, slots=True)
class ClusterTask:
    """One task of a cluster: its role, its index among the tasks of this role, and the cluster."""

    role: str
    index: int
    cluster: ClusterSpec


def _split_hosts(option: str, text: str) -> tuple[str, ...]:
    if not text.strip():
        return ()
    hosts = tuple(part.strip() for part in text.split(","))
    if not all(hosts):
        raise ConfigurationError(
            f"{option} is {text!r}, with an empty entry: separate host:port entries by one comma"
        )
    return hosts
