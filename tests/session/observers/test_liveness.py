"""What a worker's heartbeats say of the thread that makes its steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from tests.data.sources import Rows
from trireme.cluster.progress import FIRST_BATCH
from trireme.data.loader import Loader
from trireme.data.order import Order
from trireme.session.observers.liveness import Liveness

SECONDS = 10.0


def status_while(
    liveness: Liveness, block: Callable[[Callable[[], None]], None]
) -> dict[str, object]:
    """What it says while a thread of its own is held up in `block`, which calls what it is given.

    It is asked twice: of a thread that has made a step since, nobody looks where it is.
    """
    reached, release = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert release.wait(SECONDS)

    def run() -> None:
        liveness.watch()
        block(hold)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert reached.wait(SECONDS)
        liveness.status()
        return dict(liveness.status())
    finally:
        release.set()
        thread.join(SECONDS)


def test_before_the_first_step_none_is_expected() -> None:
    assert Liveness().status() == {"progress": 0, "excuse": "no step was made yet"}


def test_a_thread_that_makes_steps_is_not_looked_at() -> None:
    liveness = Liveness()
    for steps in (1, 2, 3):
        liveness.stepped()
        assert liveness.status() == {"progress": steps}


def test_a_stuck_thread_is_told_with_its_place() -> None:
    liveness = Liveness()
    liveness.stepped()
    status = status_while(liveness, lambda hold: hold())
    assert status["progress"] == 1
    assert "excuse" not in status
    assert str(status["at"]).startswith("test_liveness.py:")
    assert str(status["at"]).endswith(" in hold")


def test_a_thread_that_waits_for_a_batch_is_told_at_the_line_of_its_program() -> None:
    liveness, spans = Liveness(), queue.Queue[list[tuple[int, int]]]()
    liveness.stepped()
    watched = threading.Event()

    def iterate() -> None:
        liveness.watch()
        watched.set()
        # `spans.get`: what waits is a library, and no line of this file.
        for _ in Loader(Rows(3), Order(3), spans.get, batch_size=1):
            pass

    thread = threading.Thread(target=iterate)
    thread.start()
    assert watched.wait(SECONDS)
    place, deadline = "", time.monotonic() + SECONDS
    while not place.endswith("iterate") and time.monotonic() < deadline:
        place = str(liveness.status().get("at"))
    spans.put([])
    thread.join(SECONDS)
    assert place.startswith("test_liveness.py:")
    assert place.endswith(" in iterate")


def test_the_first_batch_is_an_excuse_with_its_place() -> None:
    liveness = Liveness()

    def load(hold: Callable[[], None]) -> None:
        with liveness.loading():
            hold()

    status = status_while(liveness, load)
    assert (status["progress"], status["excuse"]) == (0, FIRST_BATCH)
    assert str(status["at"]).startswith("test_liveness.py:")
    assert liveness.status() == {"progress": 0, "excuse": "no step was made yet"}
    liveness.stepped()
    assert "excuse" not in status_while(liveness, load)


def test_what_takes_its_time_is_an_excuse_while_it_lasts() -> None:
    liveness = Liveness()
    liveness.stepped()
    with liveness.excused("it evaluates"):
        assert liveness.status() == {"progress": 1, "excuse": "it evaluates"}
    assert "excuse" not in liveness.status()
