"""A parameter without a gradient is left alone, in every mode, exactly as torch leaves it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import Cluster
from tests.parity.absence import CASES, STEPS, build, plain, trained
from tests.parity.plain import Values, difference
from tests.parity.problems import EXACT, same_everywhere

ALONE = {
    "plain python": Cluster(1, 0),
    "async": Cluster(1, 1, "async"),
    "async on three servers": Cluster(1, 3, "async"),
    "async over lent memory": Cluster(1, 1, "async", scheme="shm"),
    "ssp": Cluster(1, 2, "ssp", staleness=2),
    "async over TCP": Cluster(1, 2, "async", scheme="tcp"),
    "averaging": Cluster(1, 1, "averaging", every=5),
}
TOGETHER = {
    "sync": Cluster(2, 1, "sync"),
    "sync of three on two servers": Cluster(3, 2, "sync"),
    "backup workers": Cluster(2, 1, "sync", aggregate=2),
    "sync over TCP": Cluster(2, 2, "sync", scheme="tcp"),
}
WAYS = {f"one worker, {way}": c for way, c in ALONE.items()} | TOGETHER


@pytest.mark.slow(one_in=3)
@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_one_plain_process_makes_of_it(case: str, way: str) -> None:
    values = same_everywhere(trained(case, WAYS[way]))
    assert difference(values, plain(case)) <= EXACT
    if way == "one worker, plain python":
        assert difference(values, plain(case)) == 0


def test_what_is_never_used_stays_as_it_was_to_the_bit() -> None:
    first = dict(build("unused").named_parameters())
    values = same_everywhere(trained("unused", TOGETHER["sync of three on two servers"]))
    for name, value in first.items():
        assert torch.equal(values[name], value) == name.startswith("branches.1")


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("way", WAYS)
def test_the_penalty_of_l2_is_for_unused_parameters_too(way: str) -> None:
    values = same_everywhere(trained("unused", WAYS[way], l2=0.1))
    assert difference(values, plain("unused", l2=0.1)) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"clip_norm": 0.1}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["alternating", "gated"])
def test_with_clipping_and_in_several_parts(case: str, way: str, options: dict[str, Any]) -> None:
    values = same_everywhere(trained(case, WAYS[way], **options))
    clip = options.get("clip_norm")
    assert difference(values, plain(case, clip_norm=clip)) <= 1e-10


@pytest.mark.parametrize("case", ["unused", "frozen", "alternating"])
def test_what_packing_loses_of_an_absent_parameter_waits(case: str) -> None:
    # Half precision of small differences: close to the exact run, and untouched where unused.
    values = same_everywhere(trained(case, Cluster(2, 2, "sync", compress="fp16")))
    assert difference(values, plain(case)) <= 0.05
    if case == "unused":
        first = dict(build(case).named_parameters())
        assert torch.equal(values["branches.1.weight"], first["branches.1.weight"])


@pytest.mark.parametrize("servers", [1, 2])
def test_with_prefetch_each_gradient_is_a_step_old_and_absent_ones_are_left_alone(
    servers: int,
) -> None:
    (values,) = trained("unused", Cluster(1, servers, "async", prefetch=True))
    first = dict(build("unused").named_parameters())
    assert torch.equal(values["branches.1.bias"], first["branches.1.bias"])
    assert not torch.equal(values["first.bias"], first["first.bias"])


def test_an_outer_momentum_does_not_move_what_was_frozen() -> None:
    frozen: dict[int, Values] = {}

    def then(session: Any) -> Values:
        return {n: p.detach().clone() for n, p in session.model.named_parameters()}

    for steps in (STEPS // 2, STEPS):
        cluster = Cluster(2, 1, "diloco", every=4)
        frozen[steps] = same_everywhere(trained("frozen", cluster, steps=range(steps), then=then))
    name = "branches.0.weight"
    assert torch.equal(frozen[STEPS // 2][name], frozen[STEPS][name])
    assert not torch.equal(frozen[STEPS // 2]["first.weight"], frozen[STEPS]["first.weight"])


CROSSINGS = [
    (Cluster(1, 0), Cluster(2, 2, "sync")),
    (Cluster(2, 2, "sync"), Cluster(1, 0)),
    (Cluster(2, 3, "sync"), Cluster(2, 1, "sync")),
    (Cluster(1, 1, "async"), Cluster(3, 2, "sync")),
]


@pytest.mark.slow
@pytest.mark.parametrize("before, after", CROSSINGS, ids=lambda c: f"{c.workers}w{c.servers}s")
@pytest.mark.parametrize("case", ["unused", "thawed", "alternating", "gated"])
def test_counters_that_differ_cross_to_other_strategies(
    case: str, before: Cluster, after: Cluster, tmp_path: Path
) -> None:
    half = STEPS // 2 + 1
    trained(case, _in(before, tmp_path), steps=range(half))
    values = same_everywhere(trained(case, _in(after, tmp_path), steps=range(half, STEPS)))
    # Torch itself loads NAdam's product of momenta, a float32, as what the parameters are.
    assert difference(values, plain(case)) <= (1e-10 if case == "thawed" else EXACT)


def _in(cluster: Cluster, run_dir: Path) -> Cluster:
    return replace(cluster, run_dir=run_dir)
