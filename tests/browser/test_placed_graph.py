"""TensorBoard colours the graph of a placed model by the tasks, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import page_of, serve, train

if TYPE_CHECKING:
    from tests.browser.page import Page

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parent / "programs" / "placed.py"


@pytest.fixture
def placed(driver: object, tmp_path: Path) -> Iterator[object]:
    """The browser on a job of two tasks that hold one graph."""
    run_dir = train(tmp_path / "run", "--workers", "2", "--strategy", "graph", program=PROGRAM)
    with serve(run_dir) as address:
        yield page_of(driver, address)


def test_towers_have_the_colours_of_their_tasks(placed: Page) -> None:
    placed.open("graphs")
    placed.wait(lambda: placed.elements("g.node[data-name='left']"), "the graph is not drawn")
    placed.click("paper-radio-button", "Device")
    # The legend leaves out what is before the tasks' numbers, as both devices have that.
    rows = placed.wait(
        lambda: [each for each in placed.texts(".color-legend-row") if "device:CPU" in each],
        "no device in the legend",
    )
    assert rows == ["0/device:CPU:0", "1/device:CPU:0"]
    left, right = (
        placed.wait(lambda name=name: colours(placed, name)) for name in ("left", "right")
    )
    assert len(left) == len(right) == 1
    assert left != right
    placed.picture("graph_devices")


def colours(page: Page, module: str) -> list[str]:
    """Returns the colours of the devices that compute a module."""
    found: list[str] = page.script(
        "return [...new Set(deep(arguments[0]).map(e => e.style.stopColor || "
        "e.getAttribute('stop-color')))]",
        f"#device-{module} stop",
    )
    return found
