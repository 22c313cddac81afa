from __future__ import annotations

import pytest

from tests.wire.serving import EchoHandler, ask, running
from trireme.wire.service import BURST, LINE_SECONDS, Refusals


def test_all_are_counted_and_few_are_said(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(100_000):
        refusals.log(number * 1e-4, f"denied number {number}")  # ten seconds of it
        refusals.tick(number * 1e-4)
    assert refusals.count == 100_000
    said = [record.getMessage() for record in caplog.records]
    assert said[:BURST] == [f"denied number {number}" for number in range(BURST)]
    assert len(said) <= BURST + 1
    refusals.tick(2 * LINE_SECONDS)
    total = sum(int(line.split()[0]) for line in caplog.messages if "more connections" in line)
    assert total + sum(line.startswith("denied") for line in caplog.messages) == 100_000


def test_after_a_quiet_time_each_is_said_again(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(BURST):
        refusals.log(0.0, f"denied number {number}")
    refusals.log(0.0, "denied without a word")
    refusals.tick(BURST * LINE_SECONDS)
    refusals.log(BURST * LINE_SECONDS, "denied once more")
    assert "denied without a word" not in caplog.text
    assert "1 more connections were refused, 21 in all" in caplog.text
    assert caplog.messages[-1] == "denied once more"


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with running(EchoHandler()) as run:
        good = run.client()
        for _ in range(3 * BURST):
            stranger = run.stranger()
            stranger.write([b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
            stranger.close()
            ask(good, "still served")
        run.turn()
        good.close()
    assert run.service.refusals.count >= 3 * BURST
    assert len([line for line in caplog.messages if "a stranger" in line]) <= BURST + 1
