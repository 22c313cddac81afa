"""Whether another process of this host uses the processor, as the kernel tells."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import psutil

from trireme.host import process_birth


class Neighbours:
    """The processes of a process group that run on this host."""

    def __init__(
        self, rank: int, put: Callable[[str, bytes], None], get: Callable[[str], bytes | None]
    ) -> None:
        self._get = get
        self._known: dict[int, tuple[int, str]] = {}
        pid = os.getpid()
        put(f"process/{rank}", msgspec.msgpack.encode((pid, process_birth(pid))))

    def used(self, rank: int) -> float | None:
        """Returns the processor's seconds of all threads of a process; None if it is not here."""
        if rank not in self._known:
            data = self._get(f"process/{rank}")
            if data is None:
                return None
            self._known[rank] = msgspec.msgpack.decode(data, type=tuple[int, str])
        pid, birth = self._known[rank]
        # The same id may be another process's on another host, and in another container.
        if pid == os.getpid() or not birth or process_birth(pid) != birth:
            return None
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            return None
        return times.user + times.system
