"""The page of `trireme graph --html`, in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import PICTURES
from tests.graph.drawing.samples import picture
from trireme.errors import ConfigurationError
from trireme.graph.drawing.page import page
from trireme.graph.drawing.svg import element, svg

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]


@pytest.fixture
def shown(driver: Any, tmp_path: Path) -> Any:
    """The browser on the page of a graph with its drawing."""
    try:
        drawing = element(svg(picture(), legend=False))
    except ConfigurationError as error:
        pytest.skip(str(error))
    file = tmp_path / "graph.html"
    file.write_text(page(picture(), drawing), encoding="utf-8")
    driver.get(file.as_uri())
    PICTURES.mkdir(parents=True, exist_ok=True)
    driver.save_screenshot(str(PICTURES / "graph_page.png"))
    return driver


def test_modules_fold_and_columns_are_aligned(shown: Any) -> None:
    leaves = shown.find_elements("css selector", "details > .leaf")
    summaries = shown.find_elements("css selector", "summary")
    assert [each.text.split("\n")[0] for each in summaries if each.is_displayed()] == [
        "a",
        "inner",
        "block",
        "z",
    ]
    before = sum(each.is_displayed() for each in leaves)
    block = next(each for each in summaries if each.text.startswith("block"))
    block.click()
    assert sum(each.is_displayed() for each in leaves) == before - 3
    rights = {
        round(line.find_elements("css selector", ".n")[0].rect["x"])
        for line in shown.find_elements("css selector", ".line")
        if line.is_displayed()
    }
    assert len(rights) == 1


def test_places_have_different_colours_in_table_and_drawing(shown: Any) -> None:
    def colour(selector: str, name: str) -> list[str]:
        found = shown.find_element("css selector", selector).value_of_css_property(name)
        return re.findall(r"[0-9.]+", found)[:3]

    chips = [colour(f".chip.b{number}", "background-color") for number in (0, 1)]
    assert chips[0] != chips[1]
    assert [colour(f".drawing .e{number} path", "stroke") for number in (0, 1)] == chips
    assert [colour(f".drawing .p{number} path", "stroke") for number in (0, 1)] == chips


def test_nothing_is_wider_than_the_window(shown: Any) -> None:
    width, inner = shown.execute_script(
        "return [document.documentElement.scrollWidth, window.innerWidth]"
    )
    assert width <= inner
