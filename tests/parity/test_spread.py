"""However processes hold a model together, they make of it what one plain process makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.plain import Values, difference
from tests.parity.spread import (
    ABSENT,
    CASES,
    HAS_TRANSFORMERS,
    model_of,
    train_and_look,
    train_averaged,
    train_frozen,
    train_frozen_in_between,
    train_past_the_model,
    train_plain,
    train_plain_frozen_in_between,
    train_spread,
)
from tests.parity.table import refusal
from tests.parity.ways import REPLICAS, WAYS
from tests.process_groups import ProcessGroup, run_process_group
from trireme.ps.rule import Average
from trireme.session.checkpoint import latest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

CLOSE = 1e-5
"""What float32 leaves of rounding after twenty steps; most cells are a hundred times closer."""


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, str, float | None], Values]:
    """What one plain process ends with, by case, optimizer and clipping."""
    return {}


def spread(way: str, case: str, optimizer: str = "sgd", **options: Any) -> list[Values]:
    """What each process ends with."""
    ran = run_process_group(WAYS[way], train_spread, case, REPLICAS.get(way, 1), optimizer, options)
    return [{n: torch.from_numpy(v) for n, v in values.items()} for values in ran.values]


ATTENTION = ("tensor", "pipeline interleaved", "graph")
"""Ways that cut the layers of a transformer, each in its own manner."""
COMPOSED = tuple(way for way in WAYS if "=" in way)
"""Ways of several axes: on all models they take minutes, and `make parity` shows them.

Adam with clipping, below, trains the transformer in six of them.
"""
FEW = ("allreduce", "fsdp", "tensor", "pipeline gpipe", "graph", "ps sync over tp=2")
"""In `make test`."""


@pytest.mark.thorough(but=tuple(f"MLP-{way}" for way in FEW))
@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(
            case,
            way,
            id=f"{case}-{way}",
            marks=[pytest.mark.slow]
            * (case != "MLP" and not (case == "transformer" and way in ATTENTION)),
        )
        for case in CASES
        for way in WAYS
    ],
)
def test_every_way_equals_one_process(case: str, way: str, plain: Any) -> None:
    key = (case, "sgd", None)
    if key not in plain:
        plain[key] = train_plain(case)
    for values in spread(way, case):
        assert difference(values, plain[key]) <= CLOSE


@pytest.mark.slow(but=("ps sync over tp=2",))
@pytest.mark.parametrize("way", ["fsdp", "fsdp=2,tp=2", "ps sync over tp=2"])
def test_tied_weights_stay_one(way: str, plain: Any) -> None:
    wanted = plain.setdefault(("tied", "sgd", None), train_plain("tied weights"))
    for values in spread(way, "tied weights"):
        assert difference(values, wanted) <= CLOSE
        assert torch.equal(values["head.weight"], values["embedding.token.weight"])


needs_transformers = pytest.mark.skipif(
    not HAS_TRANSFORMERS,
    reason="BERT and GPT-2 are NOT trained here: pip install 'transformers>=5' (make parity does)",
)


@pytest.mark.slow(one_in=2)
@needs_transformers
@pytest.mark.parametrize(
    ("case", "way"),
    [
        ("BERT", "allreduce"),
        ("BERT", "fsdp=2,tp=2"),
        ("BERT", "ps sync over tp=2"),
        ("GPT-2", "fsdp"),
        ("GPT-2", "averaging, H=1"),
    ],
)
def test_models_of_transformers_train_by_their_own_loss(case: str, way: str) -> None:
    wanted = train_plain(case)
    for values in spread(way, case):
        assert difference(values, wanted) <= CLOSE


@pytest.mark.parametrize(
    ("case", "way", "reason"),
    [
        ("tied weights", "pipeline gpipe", "are one parameter, and lie in pipeline stages 1 and 0"),
        pytest.param(
            *("GPT-2", "tensor", "one that fuses query, key and value cannot"),
            marks=needs_transformers,
        ),
        pytest.param(
            *(
                "BERT",
                "pipeline 1f1b",
                "BertForSequenceClassification cannot be split into pipeline",
            ),
            marks=needs_transformers,
        ),
    ],
)
def test_what_cannot_be_spread_so_is_refused_by_name(case: str, way: str, reason: str) -> None:
    said = refusal(run_process_group(WAYS[way], train_spread, case, REPLICAS.get(way, 1)))
    assert said is not None and reason in said


@pytest.mark.slow(
    but=(
        "allreduce-unused",
        "fsdp-unused",
        "tensor-frozen",
        "pipeline zero-bubble-unused",
        "ps sync over pp=2-unused",
        "ps sync over tp=2-frozen",
        "ps sync over dp=2-unused",
    )
)
@pytest.mark.thorough(but=("pipeline zero-bubble-unused", "fsdp-unused"))
@pytest.mark.parametrize("case", ABSENT)
@pytest.mark.parametrize(
    "way",
    [
        "allreduce",
        "fsdp",
        "tensor",
        "pipeline zero-bubble",
        "dp=2,tp=2",
        "ps sync over pp=2",
        "ps sync over tp=2",
        "ps sync over dp=2",
        "ps sync over dp=2,tp=2",
    ],
)
def test_what_has_no_gradient_is_left_alone(way: str, case: str) -> None:
    wanted, first = train_plain(case), dict(model_of(case).named_parameters())
    for values in spread(way, case, ""):
        assert difference(values, wanted) <= 1e-6
        if case == "unused":
            assert torch.equal(values["2.unused.weight"], first["2.unused.weight"])


@pytest.mark.parametrize("way", ["allreduce", "pipeline 1f1b", "ps sync over pp=2"])
def test_adamw_moves_no_unused_layer(way: str) -> None:
    wanted = train_plain("unused", "adamw")
    for values in spread(way, "unused", "adamw"):
        assert difference(values, wanted) <= 1e-4
        assert torch.equal(values["2.unused.bias"], wanted["2.unused.bias"])


@pytest.mark.slow(
    but=(
        "allreduce-{}-decay",
        "allreduce-{'accumulate': 2}-adam",
        "ps sync over dp=2-{}-adam",
        "ps sync over dp=2-{'accumulate': 2}-decay",
    )
)
@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["decay", "adam"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_norm": 100.0}], ids=str)
@pytest.mark.parametrize("way", ["allreduce", "ps sync over dp=2"])
def test_a_gradient_that_one_process_has_alone_counts_for_all(
    way: str, options: dict[str, Any], optimizer: str
) -> None:
    wanted, found = train_plain("gated", optimizer), spread(way, "gated", optimizer, **options)
    for values in found:
        assert difference(values, wanted) <= CLOSE
        assert all(torch.equal(values[name], found[0][name]) for name in values)


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough(but=("allreduce",))
@pytest.mark.parametrize("way", ["allreduce", "fsdp", "ps sync over tp=2", "ps sync over dp=2"])
def test_frozen_parameters_are_saved_and_a_job_goes_on_with_them(way: str, tmp_path: Path) -> None:
    process_group, wanted = WAYS[way], dict(model_of("frozen").named_parameters())["2.weight"]
    before = run_process_group(process_group, train_frozen, str(tmp_path), 6).values[0]
    saved = latest(tmp_path, lambda path, error: pytest.fail(f"{path}: {error}"))
    assert saved is not None and saved.step == 6
    assert torch.equal(saved.model["2.weight"], wanted)
    assert not any(name.startswith("2.weight/") for name in saved.optimizer)
    for name, value in before.items():
        assert torch.equal(saved.model[name], torch.from_numpy(value))
    after = run_process_group(process_group, train_frozen, str(tmp_path), 12, 6).values[0]
    assert torch.equal(torch.from_numpy(after["2.weight"]), wanted)
    assert (after["0.weight"] != before["0.weight"]).any()


@pytest.mark.thorough
@pytest.mark.slow(but=("tp=2,pp=2",))
@pytest.mark.parametrize("way", ["tp=2,pp=2", "fsdp=2,tp=2", "ps sync over dp=2,tp=2"])
def test_adam_with_clipping_by_the_norm_of_the_whole_gradient(way: str) -> None:
    # Steps of Adam are of one size however small the gradient, so rounding weighs more.
    wanted = train_plain("transformer", "adam", clip_norm=0.1)
    for values in spread(way, "transformer", "adam", clip_norm=0.1):
        assert difference(values, wanted) <= 2e-4


@pytest.mark.thorough(but=("fsdp",))
@pytest.mark.parametrize("way", ["fsdp", "dp=2,tp=2", "ps sync over dp=2"])
def test_gradients_may_be_added_up_before_they_are_averaged(way: str) -> None:
    wanted = train_plain("MLP")
    for values in spread(way, "MLP", accumulate=2):
        assert difference(values, wanted) <= CLOSE


@pytest.mark.thorough(but=("fsdp",))
@pytest.mark.parametrize("way", ["fsdp", "pipeline 1f1b", "ps sync over dp=2"])
def test_a_moving_average_is_kept_of_every_part(way: str) -> None:
    wanted = train_averaged("MLP", decay=0.9)
    options = {"ema": Average(0.9, warm_up=False)}
    replicas = REPLICAS.get(way, 1)
    ran = run_process_group(WAYS[way], train_spread, "MLP", replicas, "sgd", options, "average")
    # With servers, who speaks to them has the average; the others of its worker have none.
    found = [values for values in ran.values if values]
    assert len(found) == (WAYS[way].workers if WAYS[way].servers else len(ran.values))
    for values in found:
        assert difference({n: torch.from_numpy(v) for n, v in values.items()}, wanted) <= CLOSE


@pytest.mark.thorough(but=("allreduce",))
@pytest.mark.parametrize("way", ["allreduce", "fsdp", "pipeline 1f1b"])
def test_half_precision_comes_near(way: str) -> None:
    wanted = train_plain("MLP")
    for values in spread(way, "MLP", precision="bfloat16"):
        assert 1e-7 < difference(values, wanted) < 0.05


@pytest.mark.parametrize("way", ["pipeline gpipe", "pipeline zero-bubble", "tensor"])
def test_a_recurrent_layer_goes_on_where_its_batch_before_ended(way: str) -> None:
    wanted = train_plain("LSTM that goes on")
    for values in spread(way, "LSTM that goes on"):
        assert difference(values, wanted) <= CLOSE


@pytest.mark.parametrize("way", ["one micro-batch", "tensor"])
def test_running_statistics_are_those_of_one_process(way: str) -> None:
    wanted = train_plain("batch normalization")
    assert any("running_mean" in name for name in wanted)
    for values in spread(way, "batch normalization"):
        assert difference(values, wanted) <= CLOSE


CUT = [
    *("allreduce", "fsdp", "tensor", "pipeline gpipe", "fsdp=2,tp=2"),
    *("ps sync over tp=2", "ps sync over dp=2"),
]


@pytest.mark.slow(one_in=3)
@pytest.mark.thorough(but=("allreduce", "ps sync over tp=2"))
@pytest.mark.parametrize("way", CUT)
def test_a_program_freezes_and_thaws_the_model_that_it_knows(way: str) -> None:
    ran = run_process_group(WAYS[way], train_frozen_in_between, REPLICAS.get(way, 1))
    plain = train_plain_frozen_in_between()
    for values in ran.values:
        assert difference({n: torch.from_numpy(v) for n, v in values.items()}, plain) <= 1e-6


@pytest.mark.parametrize("way", ["fsdp", "tensor"])
def test_a_loss_that_reaches_nothing_that_is_trained_is_refused(way: str) -> None:
    said = refusal(run_process_group(WAYS[way], train_past_the_model, REPLICAS.get(way, 1)))
    assert said is not None and "the loss reached no parameter that is trained" in said


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough(but=("allreduce",))
@pytest.mark.parametrize(
    "way", ["allreduce", "fsdp", "tp=2,pp=2", "ps sync over pp=2", "ps sync over dp=2"]
)
def test_the_chief_may_evaluate_alone(way: str) -> None:
    wanted = train_plain("MLP")
    ran = run_process_group(WAYS[way], train_and_look, "MLP", REPLICAS.get(way, 1)).values
    for values, _ in ran:
        assert difference({n: torch.from_numpy(v) for n, v in values.items()}, wanted) <= CLOSE
    losses = ran[0][1]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)


def test_processes_that_average_have_the_same_bits() -> None:
    first, second = spread("allreduce", "LeNet-5")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_mesh_of_one_is_one_process() -> None:
    (alone,) = run_process_group(
        ProcessGroup(1, strategy="allreduce"), train_spread, "MLP", 1
    ).values
    found = {name: torch.from_numpy(value) for name, value in alone.items()}
    assert difference(found, train_plain("MLP")) == 0
