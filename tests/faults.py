"""Faults, injected by wrapping: nothing in Trireme knows of them.

Faults   a hook: a worker is killed, stopped, or raises, at a step of its own
Proxy    a TCP proxy on loopback that delays, holds back or cuts what goes through it
Proxies  has every parameter server's clients in this process go through such a proxy
"""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from trireme.session.hooks import Hook
from trireme.session.session import Session
from trireme.wire import transport
from trireme.wire.transport import Stream

# A step of a worker ------------------------------------------------------------------------------


class Injected(Exception):
    """What a worker raises when it is told to."""


@dataclass(frozen=True)
class Fault:
    """What happens to which worker, and when.

    Attributes:
        worker: its index.
        step: its own step, from 1, in the process that it is at that time.
        moment: `before` the step; or `in flight`: its push is sent and not answered.
        action: `kill` (SIGKILL), `hang` (SIGSTOP), `raise`, `stop job` (SIGTERM to the launcher,
            as a user's `kill` sends it), or `hear of stop` (it waits for another one's `stop job`).
    """

    worker: int
    step: int
    moment: str
    action: str

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Reads `worker:step:moment:action`."""
        worker, step, moment, action = text.split(":")
        return cls(int(worker), int(step), moment, action)

    def happen(self) -> None:
        """Lets it happen to this process.

        Raises:
            Injected: if that is the fault.
        """
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.action == "stop job":
            os.kill(os.getppid(), signal.SIGTERM)
        elif self.action == "hear of stop":
            pass  # see `Faults`
        else:
            raise Injected(f"worker:{self.worker} at its step {self.step}")


def _until_told(session: Session) -> None:
    """Waits until a worker has heard that its job is to stop: its steps take no time at all."""
    deadline = time.monotonic() + 60.0
    while session.worker.lifecycle.interrupted is None:
        assert time.monotonic() < deadline, "nobody told this worker to stop"
        threading.Event().wait(0.005)


class Faults(Hook):
    """Lets faults happen to the worker whose session it hooks.

    Args:
        faults: what is to happen.
        notes: a directory where it is noted what has: to a worker that is started again, the same
            thing does not happen twice.
    """

    def __init__(self, faults: Iterable[Fault], notes: Path) -> None:
        self._faults = list(faults)
        self._notes = notes
        self._step = 0

    def before_step(self, session: Session, batch: Any) -> None:
        self._step += 1
        for fault in self._faults:
            if (fault.worker, fault.step) == (session.task.index, self._step):
                self._due(fault, session)

    def _due(self, fault: Fault, session: Session) -> None:
        note = self._notes / f"fault-{fault.worker}-{fault.step}"
        try:
            note.touch(exist_ok=False)
        except FileExistsError:
            return
        if fault.moment == "before":
            fault.happen()
            if fault.action in ("stop job", "hear of stop"):
                _until_told(session)
            return
        backend: Any = session.worker.backend
        wait = backend.wait

        def wait_in_vain() -> Any:
            backend.wait = wait
            fault.happen()
            return wait()

        backend.wait = wait_in_vain


# A connection -----------------------------------------------------------------------------------


class Proxy:
    """Forwards connections to another address of this host, well or badly.

    Args:
        target: `tcp://host:port`.
        lifetimes: how many bytes each of the connections to come lives for, both directions
            counted together; it is reset in the middle of what it carries then.

    Who connects through one is to believe that there is none: see `unnoticed`.

    Attributes:
        address: where it listens, with its scheme.
        delay: seconds that each piece is held back.
        connections, cuts: how many there were.
    """

    def __init__(self, target: str, lifetimes: Callable[[], int | None] = lambda: None) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._lifetimes = lifetimes
        self.delay = 0.0
        self.connections = 0
        self.cuts = 0
        self._flowing = threading.Event()
        self._flowing.set()
        self._open: set[_Pair] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        _targets[self.address] = target
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Forwards nothing for now; what comes is kept."""
        self._flowing.clear()

    def flow(self) -> None:
        """Forwards what was held."""
        self._flowing.set()

    def cut(self) -> None:
        """Resets all connections."""
        with self._lock:
            pairs, self._open = self._open, set()
        for pair in pairs:
            self.cuts += 1
            pair.reset()

    def close(self) -> None:
        """Resets all connections and listens no longer."""
        _targets.pop(self.address, None)  # the port may be given to a real server next
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.flow()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5.0)
            except OSError:
                _reset(near)
                continue
            far.settimeout(None)
            self.connections += 1
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = _Pair(near, far, self._lifetimes())
            with self._lock:
                self._open.add(pair)
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._sender, args=(pair, *ends), daemon=True).start()

    def _sender(self, pair: _Pair, source: socket.socket, sink: socket.socket) -> None:
        pause = threading.Event()
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                if self.delay:
                    pause.wait(self.delay)
                kept = pair.spend(len(data))
                sink.sendall(data[:kept])
                if kept < len(data):
                    self.cuts += 1
                    pair.reset()
                    break
            else:
                sink.shutdown(socket.SHUT_WR)
                return
        with self._lock:
            self._open.discard(pair)


_targets: dict[str, str] = {}  # of each proxy of this process that listens


def unnoticed(address: str, *, timeout: float) -> Stream:
    """Connects as `transport.connect` does, and takes a proxy on loopback for its target.

    Handshakes find out what passes them on; proxies here stand for the network, which does too.
    """
    stream = transport.connect(address, timeout=timeout)
    stream.called = _targets.get(address, stream.called)
    return stream


class _Pair:
    """The two connections of one that goes through, and how many bytes it has left."""

    def __init__(self, near: socket.socket, far: socket.socket, lifetime: int | None) -> None:
        self._ends = (near, far)
        self._left = lifetime
        self._lock = threading.Lock()

    def spend(self, count: int) -> int:
        """Returns how many of so many bytes may pass."""
        with self._lock:
            if self._left is None:
                return count
            passed = min(count, self._left)
            self._left -= passed
            return passed

    def reset(self) -> None:
        for end in self._ends:
            _reset(end)


def _reset(end: socket.socket) -> None:
    """Closes a connection the hard way: the peer is told that it broke, not that it ended."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Wakes a thread that waits in recv, which close alone does not; no FIN is sent for it
        # because the reset below is quicker than the kernel's wish to be polite.
        end.shutdown(socket.SHUT_RD)
    end.close()


class Proxies:
    """Leads the parameter server's clients in this process through proxies, one for each server.

    To be used as a context manager around the whole job.

    Args:
        seed: chooses after how many bytes each connection is cut.
        mean_lifetime: how many bytes that is on average; None: none is cut but by `cut`.
    """

    def __init__(self, seed: int = 0, mean_lifetime: int | None = None) -> None:
        self._random = random.Random(seed)
        self._mean = mean_lifetime
        self._lock = threading.Lock()
        self.by_server: dict[str, Proxy] = {}
        self._patch = mock.patch("trireme.ps.client.server_links.connect", self._connect)

    def __enter__(self) -> Proxies:
        self._patch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._patch.stop()
        for proxy in self.by_server.values():
            proxy.close()

    @property
    def cuts(self) -> int:
        """How many connections were cut."""
        return sum(proxy.cuts for proxy in self.by_server.values())

    def _lifetime(self) -> int | None:
        return None if self._mean is None else int(self._random.expovariate(1 / self._mean))

    def _connect(self, address: str, *, timeout: float) -> Stream:
        with self._lock:
            if address not in self.by_server:
                self.by_server[address] = Proxy(address, self._lifetime)
        return unnoticed(self.by_server[address].address, timeout=timeout)
