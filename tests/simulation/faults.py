"""What goes wrong with servers, the network and the coordinator, and how the job's size changes."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from tests.simulation.launcher import Home, Launcher
from tests.simulation.network import Network
from tests.simulation.schedule import Fault
from trireme.cluster.messages import Message, Scale, Scaled

_MOST_SERVERS, _MOST_WORKERS = 5, 6
_STAY_CUT = 3.0  # seconds, where a schedule says for ever
_STAY_DEAF = 8.0
_STAYS_BROKEN = 20.0  # likewise, of a link or a loop; longer than most jobs take


class Place(Home, Protocol):
    """Where faults happen."""

    launcher: Launcher
    members_network: Network
    fails: bool


class Faults:
    """Carries out the faults of a schedule.

    Args:
        place: where.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def plan(self) -> None:
        """Has all faults happen at their times, as soon as the job has begun."""
        for fault in self._place.schedule.faults:
            self._at(fault.at, fault)

    def _at(self, at: float, fault: Fault) -> None:
        self._place.loop.at(at, lambda: self._begin(fault))

    def _begin(self, fault: Fault) -> None:
        coordinator, loop = self._place.coordinator, self._place.loop
        if coordinator.state.over is not None or coordinator.done:
            return
        if not coordinator.view.number:
            self._at(loop.now + 0.1, fault)
            return
        if loop.note is not None:
            loop.note(f"{loop.now:8.4f} FAULT {fault}")
        self._place.checker.counts[fault.kind] += 1
        getattr(self, "_" + fault.kind.replace(" ", "_"))(fault)

    # -- servers ----------------------------------------------------------------------------------

    def _server(self, fault: Fault) -> int | None:
        servers = sorted(self._place.launcher.servers)
        return servers[fault.target % len(servers)] if servers else None

    def _kill_server(self, fault: Fault) -> None:
        server = self._server(fault)
        if server is not None:
            self._may_lose()
            self._place.launcher.kill_server(server, self._restart(fault))

    def _restart(self, fault: Fault) -> float | None:
        """Returns when to start another process; always, where no other server would be left."""
        return 1.0 if fault.seconds is None and self._few else fault.seconds

    @property
    def _few(self) -> bool:
        return len(self._place.launcher.servers) < 3

    def _kill_all_servers(self, fault: Fault) -> None:
        self._may_lose()
        for server in sorted(self._place.launcher.servers):
            self._place.launcher.kill_server(server, fault.seconds or 0.5)

    def _stop_server(self, fault: Fault) -> None:
        server = self._server(fault)
        if server is not None:
            self._may_lose()
            self._place.launcher.servers[server].stop(fault.seconds or _STAY_CUT)

    def _silence_server(self, fault: Fault) -> None:
        server = self._server(fault)
        if server is not None:
            self._may_lose()
            self._place.launcher.servers[server].member.fall_silent(fault.seconds or _STAY_CUT)

    def _deafen_server(self, fault: Fault) -> None:
        """A server hears nobody, and all others hear it."""
        server = self._server(fault)
        if server is not None:
            self._may_lose()
            for network in (self._place.network, self._place.members_network):
                network.deafen(f"ps:{server}", fault.seconds or _STAY_DEAF)

    def _may_lose(self) -> None:
        """Notes that copies may be lost, and the job with them."""
        self._place.fails = self._place.fails or not self._place.schedule.survives

    # -- the network ------------------------------------------------------------------------------

    def _cut_one_way(self, fault: Fault) -> None:
        one, other = self._ends(fault)
        self._place.network.cut(one, other, fault.seconds or _STAY_CUT)

    def _cut_both_ways(self, fault: Fault) -> None:
        one, other = self._ends(fault)
        for pair in ((one, other), (other, one)):
            self._place.network.cut(*pair, fault.seconds or _STAY_CUT)

    def _cut_pair(self, fault: Fault) -> None:
        """Two servers do not hear each other; all others hear both."""
        servers = sorted(self._place.launcher.servers)
        if len(servers) > 1:
            one = servers[fault.target % len(servers)]
            others = [server for server in servers if server != one]
            self._part(f"ps:{one}", f"ps:{others[fault.other % len(others)]}", fault)

    def _cut_worker(self, fault: Fault) -> None:
        """A server and a worker do not hear each other; all others hear both."""
        server, workers = self._server(fault), sorted(self._place.launcher.workers)
        if server is not None and workers:
            self._part(f"ps:{server}", f"worker:{workers[fault.other % len(workers)]}", fault)

    def _part(self, one: str, other: str, fault: Fault) -> None:
        self._place.network.part(one, other, fault.seconds or _STAYS_BROKEN)

    def _stick_server(self, fault: Fault) -> None:
        """The loop of a server is stuck in a call, and its heart beats."""
        server = self._server(fault)
        if server is not None:
            self._may_lose()
            alone = len(self._place.launcher.servers) == 1
            hit = sum("server" in each.kind for each in self._place.schedule.faults)
            # Nobody kills it here: a job with no other server would fail.
            forever = _STAY_CUT if alone or hit > 1 else _STAYS_BROKEN
            self._place.launcher.servers[server].process.stop(fault.seconds or forever)

    def _ends(self, fault: Fault) -> tuple[str, str]:
        servers = [f"ps:{index}" for index in sorted(self._place.launcher.servers)] or ["ps:0"]
        everybody = servers * 2 + [f"worker:{index}" for index in self._place.launcher.workers]
        one, other = (servers[fault.target % len(servers)], everybody[fault.other % len(everybody)])
        return (one, other) if fault.other % 2 else (other, one)

    # -- the job's size ---------------------------------------------------------------------------

    def _count(self, role: str) -> int:
        return len(self._place.coordinator.state.wanted(role))

    def _add_server(self, fault: Fault) -> None:
        if self._count("ps") >= _MOST_SERVERS:
            return
        if fault.target % 2:  # it joins by itself
            self._place.launcher.start_server(len(self._place.coordinator.state.of("ps")))
        else:
            self._scale(Scale(servers=self._count("ps") + 1))

    def _remove_server(self, fault: Fault) -> None:
        self._scale(Scale(servers=max(1, self._count("ps") - 1)))

    def _add_worker(self, fault: Fault) -> None:
        if self._count("worker") >= _MOST_WORKERS:
            return
        if fault.target % 2:
            self._place.launcher.start_worker(len(self._place.coordinator.state.of("worker")), 0.0)
        else:
            self._scale(Scale(workers=self._count("worker") + 1))

    def _remove_worker(self, fault: Fault) -> None:
        launcher, workers = self._place.launcher, max(1, self._count("worker") - 1)
        # The last ones leave. Of the others, one must live: some are never started again.
        if any(index < workers for index in launcher.members):
            self._scale(Scale(workers=workers))

    def _scale(self, scale: Scale) -> None:
        def heard(message: Message) -> None:
            if isinstance(message, Scaled):
                self._place.launcher.start_awaited()

        self._place.coordinator.tell(scale, heard)

    # -- signals ----------------------------------------------------------------------------------

    def _signal_worker(self, fault: Fault) -> None:
        workers = sorted(self._place.launcher.members)
        if workers:
            worker = workers[fault.target % len(workers)]
            self._place.launcher.signal_worker(worker, fault.seconds)

    def _signal_chief(self, fault: Fault) -> None:
        chief = self._place.coordinator.view.chief
        if chief in self._place.launcher.members:
            self._place.launcher.signal_worker(chief, fault.seconds)

    def _signal_all(self, fault: Fault) -> None:
        """Signals all workers, one after the other, and not all within the settling time."""
        launcher, rng = self._place.launcher, self._place.network.rng
        for worker in sorted(launcher.members):
            self._place.loop.after(
                rng.uniform(0, 0.3), partial(launcher.signal_worker, worker, fault.seconds)
            )

    def _signal_server(self, fault: Fault) -> None:
        server = self._server(fault)
        if server is not None:
            self._place.launcher.servers[server].member.signal("SIGTERM")

    # -- others -----------------------------------------------------------------------------------

    def _stop_worker(self, fault: Fault) -> None:
        workers = sorted(self._place.launcher.members)
        if workers:
            worker = workers[fault.target % len(workers)]
            self._place.launcher.process(worker).stop(fault.seconds or _STAY_CUT)

    def _kill_coordinator(self, fault: Fault) -> None:
        if self._place.coordinator.process.alive:
            self._may_lose()  # servers may take too long to come back
            self._place.coordinator.kill(fault.seconds or 1.0)
