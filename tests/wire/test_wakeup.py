from __future__ import annotations

import select

from trireme.wire.polling import Wakeup


def test_it_is_readable_from_a_wake_to_the_next_drain() -> None:
    wakeup = Wakeup()

    def readable() -> bool:
        return bool(select.select([wakeup], [], [], 0)[0])

    assert not readable()
    for _ in range(100_000):  # more than the socket holds
        wakeup.wake()
    assert readable()
    while readable():
        wakeup.drain()
    wakeup.drain()
    wakeup.wake()
    assert readable()
    wakeup.close()
    wakeup.wake()
