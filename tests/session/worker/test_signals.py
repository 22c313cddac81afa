"""What Ctrl-C and SIGTERM do while a process trains."""

from __future__ import annotations

import signal

import pytest

from trireme.session.worker.stopping import Signals


def test_the_first_signal_asks_and_a_second_sigint_ends() -> None:
    """SIGTERM may come twice: from a launcher, and from whoever signals all processes."""
    asked: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals(asked.append)
    try:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert asked == ["SIGTERM"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signals.restore()
    assert asked == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before
