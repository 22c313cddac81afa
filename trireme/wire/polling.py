"""Waiting for many descriptors at once: a thinner `selectors`, for a loop that turns often."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable

__all__ = ["READABLE", "WRITABLE", "Poller"]

READABLE: int = select.POLLIN
WRITABLE: int = select.POLLOUT

Callback = Callable[[int], None]
"""Called with what happened, as bits: `READABLE`, `WRITABLE`, others for hang-up and error."""


class Poller:
    """Calls who waits for a descriptor when something happens to it.

    It uses epoll where there is one and poll elsewhere; they give the same bits.
    """

    def __init__(self) -> None:
        self._callbacks: dict[int, Callback] = {}
        if sys.platform == "linux":
            self._poll = select.epoll()
            self._unit = 1.0
        else:
            self._poll = select.poll()
            self._unit = 1000.0

    def register(self, descriptor: int, events: int, callback: Callback) -> None:
        """Waits for these events of a descriptor from now on; hang-up and error are always told."""
        self._poll.register(descriptor, events)
        self._callbacks[descriptor] = callback

    def modify(self, descriptor: int, events: int) -> None:
        """Waits for other events of a descriptor."""
        self._poll.modify(descriptor, events)

    def unregister(self, descriptor: int) -> None:
        """Waits for a descriptor no longer; to be called before it is closed."""
        self._poll.unregister(descriptor)
        del self._callbacks[descriptor]

    def dispatch(self, seconds: float) -> bool:
        """Waits until something happens, at most so long, and makes the calls.

        A callback may be called for nothing: its descriptor may have been another's when the
        events were gathered.

        Returns:
            Whether anything happened.
        """
        events = self._poll.poll(seconds * self._unit)
        for descriptor, mask in events:
            callback = self._callbacks.get(descriptor)
            if callback is not None:
                callback(mask)
        return bool(events)

    def close(self) -> None:
        """Gives its own descriptor back."""
        if sys.platform == "linux":
            self._poll.close()
