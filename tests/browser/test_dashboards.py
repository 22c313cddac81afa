"""Each dashboard of TensorBoard shows, in a real browser, what a job has recorded."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

try:
    from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
except ModuleNotFoundError:  # the fixtures say so, and skip
    TimeoutException = TimeoutError  # type: ignore[misc, assignment]
    StaleElementReferenceException = TimeoutError  # type: ignore[misc, assignment]

if TYPE_CHECKING:
    from tests.browser.page import Page

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.timeout(300)]

STEPS = [1, 20, 40, 60, 80, 100]
LAYERS = ("conv1", "conv2", "hidden", "output")


def steps_of(page: Page, plugin: str, tag: str, run: str = "train") -> list[int]:
    """The steps of a series that TensorBoard gives as rows of (time, step, ...)."""
    route = {"scalars": "scalars", "histograms": "histograms", "distributions": "distributions"}
    rows = page.fetch(f"data/plugin/{plugin}/{route[plugin]}", tag=tag, run=run)
    return [int(row[1]) for row in rows]


def wait_for_tag(page: Page, tag: str) -> None:
    page.wait(lambda: page.has_text("tf-card-heading, .tag, card-view", tag), f"no card of {tag}")


def test_scalars_of_training_and_test_on_one_chart(page: Page) -> None:
    page.open("scalars")
    wait_for_tag(page, "accuracy")
    tags = page.fetch("data/plugin/scalars/tags")
    for tag in ("loss", "accuracy"):
        assert tag in tags["train"]
        assert tag in tags["test"]
    assert {
        "learning_rate",
        "speed/data_seconds",
        "speed/compute_seconds",
        "speed/push_seconds",
        "bytes/pushed_per_step",
        "bytes/pulled_per_step",
        "updates/staleness",
        "updates/applied_total",
        "updates/stale_total",
    } <= set(tags["train"])
    assert steps_of(page, "scalars", "loss") == list(range(5, 101, 5))
    assert steps_of(page, "scalars", "accuracy", "test") == list(range(20, 101, 20))
    # Both curves in the one card, each under its run.
    series = page.wait(
        lambda: page.script(
            "const card = deep('tf-scalar-card').find(e => e.tag === 'accuracy');"
            "return card && card.dataToLoad.map(d => d.run).sort()"
        )
    )
    assert {"train", "test"} <= set(series)
    page.picture("scalars")


def test_time_series(page: Page) -> None:
    page.open("timeseries")
    for run in ("train", "test"):
        page.wait(lambda name=run: page.has_text("scalar-card", name), f"no curve of {run}")
    page.picture("timeseries")


@pytest.mark.parametrize("plugin", ["histograms", "distributions"])
def test_histograms_and_distributions_of_every_layer(page: Page, plugin: str) -> None:
    page.open(plugin)
    wait_for_tag(page, "conv1/weight")
    tags = set(page.fetch(f"data/plugin/{plugin}/tags")["train"])
    for layer in LAYERS:
        for own in ("weight", "bias", "weight/gradient", "bias/gradient", "pre_activation"):
            assert f"{layer}/{own}" in tags
    assert {"relu1/activation", "relu2/activation", "relu3/activation"} <= tags
    for tag in ("hidden/weight/gradient", "relu1/activation"):
        assert steps_of(page, plugin, tag) == STEPS
    charts = {"histograms": "vz-histogram-timeseries", "distributions": "vz-distribution-chart"}
    page.wait(lambda: len(page.drawn(charts[plugin], "path")) > 10, "nothing is drawn")
    page.picture(plugin)


def test_moments_of_every_distribution_are_curves(page: Page) -> None:
    page.open("scalars")
    tags = set(page.fetch("data/plugin/scalars/tags")["train"])
    for moment in ("mean", "std", "min", "max"):
        assert f"conv1/weight/{moment}" in tags
        assert f"hidden/bias/gradient/{moment}" in tags
        assert f"relu3/activation/{moment}" in tags
    assert steps_of(page, "scalars", "conv2/pre_activation/std") == STEPS


def test_images(page: Page) -> None:
    page.open("images", tags="images")
    wait_for_tag(page, "images/inputs")
    tags = set(page.fetch("data/plugin/images/tags")["train"])
    # The digits come as rows of 64 numbers: pictures, as 64 is a square.
    assert tags == {"images/inputs", "conv1/filters"}
    for tag in tags:
        found = page.fetch("data/plugin/images/images", tag=tag, run="train", sample="0")
        assert [image["step"] for image in found] == STEPS
    wait_for_images(page, 2)
    page.picture("images")


def wait_for_images(page: Page, count: int) -> None:
    """Waits until the browser has decoded so many images at least, and none of them is broken."""

    def come() -> bool:
        widths = [
            page.script("return arguments[0].naturalWidth", image)
            for image in page.drawn("tf-image-loader", "img")
        ]
        return len(widths) >= count and min(widths) >= 256

    page.wait(come, f"{count} images have not come")


def test_audio(page: Page) -> None:
    page.open("audio")
    wait_for_tag(page, "tone")
    found = page.fetch("data/plugin/audio/audio", tag="tone", run="train", sample="0")
    assert [sound["step"] for sound in found] == [100]
    # It can be played: the browser itself says how long it is.
    page.wait(lambda: page.drawn("tf-audio-loader", "audio"), "no player")
    (player,) = page.drawn("tf-audio-loader", "audio")
    page.script("arguments[0].preload = 'auto'; arguments[0].load()", player)
    seconds = page.wait(lambda: page.script("return arguments[0].duration", player))
    assert seconds == pytest.approx(1.0, abs=0.01)
    page.picture("audio")


def test_graph_with_shapes_and_devices(page: Page) -> None:
    page.open("graphs")
    page.wait(lambda: page.elements("g.node[data-name='conv1']"), "the graph is not drawn")
    drawn = set(page.script("return deep('g.node').map(e => e.getAttribute('data-name'))"))
    assert {"input", "conv1", "relu1", "conv2", "relu2", "hidden", "output", "result"} <= drawn
    page.picture("graph")
    open_scope(page, "conv2", "conv2/convolution")
    choose_node(page, "conv2/convolution", "aten.convolution.default")
    (shown,) = page.all_texts("tf-node-info")
    assert "/job:worker/task:0/device:CPU:0" in shown
    assert "Tensor Output Sizes [100, 32, 8, 8]" in shown


def open_scope(page: Page, scope: str, inside: str) -> None:
    """Opens a scope of the graph by a double click, again if the page was still drawing."""
    for _ in range(5):
        with suppress(TimeoutException, StaleElementReferenceException):
            page.point_at(f"g.node[data-name='{scope}'] .nodeshape", twice=True)
            page.wait(lambda: page.elements(f"g.node[data-name='{inside}']"), seconds=5)
            return
    raise AssertionError(f"{scope} does not open")


def choose_node(page: Page, name: str, operation: str) -> None:
    """Has the page tell of a node, by a click, again if the page was still moving."""
    for _ in range(5):
        with suppress(TimeoutException, StaleElementReferenceException):
            page.point_at(f"g.node[data-name='{name}'] .nodeshape")
            page.wait(lambda: page.has_text("tf-node-info", operation), seconds=5)
            return
    raise AssertionError(f"{name} cannot be chosen")


def test_text(page: Page) -> None:
    page.open("text")
    page.wait(lambda: page.has_text("tf-text-loader, tf-markdown-view", "found"), "no note")
    found = page.fetch("data/plugin/text/text", tag="note/text_summary", run="train")
    assert "<em>found</em>" in found[0]["text"]
    page.picture("text")
