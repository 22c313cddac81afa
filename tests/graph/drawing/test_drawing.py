"""What `trireme graph` shows of a placed model, as text and as a drawing."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from trireme.graph.capture.capture import capture
from trireme.graph.config import GraphConfig
from trireme.graph.drawing.picture import Module, Picture
from trireme.graph.drawing.text import (
    EACH_TASK,
    WIDTH,
    duration,
    milliseconds,
    placement_rows,
    text,
)
from trireme.graph.place.costs import Device, Hardware, Link
from trireme.graph.placed.decision import Decider, Example

DEVICES = ("worker:0/cpu", "worker:1/cpu")


class Towers(nn.Module):
    """Two towers that read a half of the input each."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.right = nn.Sequential(nn.Linear(4, 6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, 1)
        return self.left(left) + self.right(right)


@pytest.fixture(scope="module")
def picture() -> Picture:
    torch.manual_seed(0)
    model, inputs = Towers(), torch.rand(6, 8)
    config = GraphConfig({"right": "worker:1", "*": "worker:0"}, microbatches=2)
    hardware = Hardware(
        tuple(Device(name, memory_bytes=10**9) for name in DEVICES), Link(1e-4, 1e9)
    )
    decider = Decider.of(config, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    example = Example((inputs[:3],), {}, lambda outputs, targets: outputs.sum())
    captured = capture(model, (inputs,))
    return decider.decide(captured, model, example, hardware=hardware, homes={})[1]


def test_the_text_has_each_section_in_lines_of_a_terminal(picture: Picture) -> None:
    shown = text(picture)
    assert all(len(line) <= WIDTH for line in shown.splitlines())
    sections = re.findall(r"^(\w+): ", shown, re.M)
    assert sections == ["captured", "placed", "cut", "predicted"]
    assert re.search(r"captured: \d+ operators of Towers\n +.*chunk", shown)
    assert re.search(r"linear +aten\.linear +float32\[\w+, 6\] +test_drawing\.py:\d+", shown)
    assert re.search(r"left +worker:0/cpu +2 ", shown)
    assert re.search(r"right +worker:1/cpu +2 ", shown)
    assert re.search(r"cut: \d segments, [12] transfers? forward", shown)
    assert "late" not in shown  # no segment has an early part beside it
    assert re.search(r"tanh +worker:1/cpu +worker:0/cpu +72 B +returns", shown)
    assert re.search(r"predicted: \S+ ms a step of 2 micro-batches", shown)
    assert re.search(r"worker:1/cpu +\S+ ms +\d+% +\S+ \w*B +953\.7 MiB", shown)
    assert "single worker:0/cpu" in shown


def test_a_module_in_one_place_is_a_row_and_so_are_nodes_side_by_side(picture: Picture) -> None:
    listed = [node for node in picture.nodes if node.kind not in ("placeholder", "output")]
    rows = dict(placement_rows(Module.of(listed)))
    assert {"left", "right"} <= rows.keys()
    assert [node.name for node in rows["left"] if node.computes] == ["linear", "relu"]
    assert any("add" in label.split(" to ") for label in rows)
    assert sum(map(len, rows.values())) == len(listed)
    assert EACH_TASK in text(picture)


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [milliseconds(each) for each in (0, 1e-7, 1.234e-5, 1.234)] == [
        *("0", "<0.001", "0.0123", "1,234")
    ]
    assert (duration(0.0123), duration(1.5)) == ("12.3 ms", "1.5 s")
