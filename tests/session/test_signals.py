"""What Ctrl-C and SIGTERM do while a process trains."""

from __future__ import annotations

import signal

import pytest

from trireme.session.stopping import Signals


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends(second: signal.Signals) -> None:
    asked: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals(asked.append)
    try:
        signal.raise_signal(signal.SIGTERM)
        assert asked == ["SIGTERM"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(second)
    finally:
        signals.restore()
    assert asked == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before
