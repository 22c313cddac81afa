"""What a session offers is there for a dataflow graph too, or is refused with what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.gan import train_plain as train_plain_gan
from tests.parity.gan import train_session as train_gan
from tests.parity.graph_programs import (
    FORMS,
    loss_of,
    squared,
    train_and_say,
    train_form,
    train_from_one_example,
    train_on_other_batches,
    train_plainly,
    train_two_losses,
    train_with_hooks,
    train_with_modes,
    unfreeze_alone,
)
from tests.parity.inside import train_with_bad_examples
from tests.parity.plain import Values, difference
from tests.parity.spread import (
    STEPS,
    model_of,
    train_averaged,
    train_frozen_in_between,
    train_plain,
    train_plain_frozen_in_between,
    train_spread,
)
from tests.process_groups import ProcessGroup, run_process_group
from trireme.errors import ConfigurationError
from trireme.graph.config import GraphConfig
from trireme.ps.rule import Average

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

CLOSE = 1e-5
GRAPH = ProcessGroup(2, strategy="graph", microbatches=3)
LAYERS = {"graph": GraphConfig({"hidden2": "worker:1", "*": "worker:0"})}
"""Three layers of an MLP, of which the second is elsewhere than its neighbours."""


def tensors(values: dict[str, Any]) -> Values:
    return {name: torch.from_numpy(value) for name, value in values.items()}


def refused(program: Any, *args: Any, spread: ProcessGroup = GRAPH) -> str:
    """What rank 0 raises."""
    ran = run_process_group(spread, program, *args)
    assert not ran.returned
    return ran.raised[0]


# Batches and losses ------------------------------------------------------------------------------


@pytest.mark.slow(but=("pairs",))
@pytest.mark.parametrize("form", FORMS)
def test_batches_of_every_form_and_size(form: str) -> None:
    losses, wanted = train_plainly()
    ran = run_process_group(GRAPH, train_form, form, {})
    for found, values in ran.values:
        assert found == pytest.approx(losses, abs=1e-5)
        own = {name.removeprefix("body."): value for name, value in tensors(values).items()}
        assert difference(own, wanted) <= CLOSE


@pytest.mark.thorough
def test_the_first_batch_may_be_of_one_example() -> None:
    (wanted,) = run_process_group(ProcessGroup(), train_from_one_example).values
    for losses in run_process_group(
        replace(GRAPH, microbatches=None), train_from_one_example
    ).values:
        assert losses == pytest.approx(wanted, abs=1e-5)


def test_a_step_may_have_another_loss() -> None:
    _, wanted = train_plainly(lambda place: squared if place % 2 else loss_of)
    for values in run_process_group(GRAPH, train_two_losses).values:
        assert difference(tensors(values), wanted) <= CLOSE


def test_tasks_with_different_batches_are_refused() -> None:
    ran = run_process_group(GRAPH, train_on_other_batches)
    assert len(ran.raised) == 2
    assert any("were given different batches" in said for said in ran.raised.values())


@pytest.mark.thorough
def test_a_gan_of_two_optimizers() -> None:
    wanted = train_plain_gan()
    for values in run_process_group(GRAPH, train_gan).values:
        assert difference(tensors(values), wanted) <= 1e-6


# Options of the session ----------------------------------------------------------------------


def test_clipping_is_by_the_norm_of_the_whole_gradient() -> None:
    wanted = train_plain("MLP", clip_norm=0.3)
    assert difference(wanted, train_plain("MLP")) > 1e-3
    ran = run_process_group(GRAPH, train_spread, "MLP", 1, "", LAYERS | {"clip_norm": 0.3})
    for values in ran.values:
        assert difference(tensors(values), wanted) <= CLOSE


def test_l2_is_added_once_to_each_weight() -> None:
    options = {"l2": 0.05}
    (wanted,) = run_process_group(ProcessGroup(), train_spread, "MLP", 1, "", options).values
    assert difference(tensors(wanted), train_plain("MLP")) > 1e-3
    for values in run_process_group(GRAPH, train_spread, "MLP", 1, "", LAYERS | options).values:
        assert difference(tensors(values), tensors(wanted)) <= CLOSE


@pytest.mark.thorough
def test_a_moving_average_is_kept_of_every_parameter() -> None:
    options = LAYERS | {"ema": Average(0.9, warm_up=False)}
    ran = run_process_group(GRAPH, train_spread, "MLP", 1, "sgd", options, "average")
    for values in ran.values:
        assert difference(tensors(values), train_averaged("MLP", decay=0.9)) <= CLOSE


@pytest.mark.thorough
def test_a_step_whose_loss_is_not_finite_is_left_out_by_all() -> None:
    bad = (13, 14, 50)
    (wanted,) = run_process_group(
        ProcessGroup(1, strategy="allreduce"), train_with_bad_examples, bad
    ).values
    for values in run_process_group(GRAPH, train_with_bad_examples, bad).values:
        assert difference(tensors(values), tensors(wanted)) <= CLOSE


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"accumulate": 3}, "use --microbatches 3"),
        ({"precision": "bfloat16"}, "it computes in the precision of the model"),
    ],
)
def test_options_without_a_meaning_say_what_has_it(options: Any, what: str) -> None:
    assert what in refused(train_spread, "MLP", 1, "", options)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"algorithm": "cut"}, r"did you mean cuts\?"),
        ({"algorithm": "expert"}, "there are"),
        ({"microbatches": 0}, r"microbatches=0\): it must be 1 or more"),
        ({"memory_limit": 0}, r"memory_limit=0\): it must be 1 or more"),
    ],
)
def test_a_wrong_configuration_is_refused(options: Any, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        GraphConfig(**options)


# Requests ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_request_that_cannot_be_met_is_a_warning_and_a_table_is_printed() -> None:
    config = GraphConfig(placement={"hidden1": "worker:7"}, log_placement=True)
    first, other = run_process_group(GRAPH, train_and_say, {"graph": config}).values
    assert any("cannot be on worker:7: this job has worker:0/cpu, worker:1/cpu" in s for s in first)
    assert any("predicted" in sentence and "3 micro-batches" in sentence for sentence in first)
    said = [sentence for sentence in first if "cannot be on" not in sentence]
    assert said == other, "the chief alone warns, and the launcher shows what it says"


def test_a_hard_request_that_cannot_be_met_is_refused_in_every_process() -> None:
    config = GraphConfig(placement={"hidden1": "worker:7"}, soft=False)
    ran = run_process_group(GRAPH, train_and_say, {"graph": config})
    assert len(ran.raised) == 2
    assert all("cannot be on worker:7" in said for said in ran.raised.values())


OVER_SERVERS = ProcessGroup(2, servers=1, strategy="sync", mesh="graph=2", inside=2)


@pytest.mark.slow(but=("MLP", "batch normalization"))
@pytest.mark.thorough
@pytest.mark.parametrize("case", ["MLP", "frozen", "batch normalization"])
def test_variables_on_servers_and_operations_on_workers(case: str) -> None:
    """As the classic programs placed them: a worker of two tasks computes one graph."""
    first = next(name for name, _ in model_of(case).named_parameters())
    last = next(reversed([name for name, _ in model_of(case).named_modules()]))
    config = GraphConfig({first: "ps:0", last: "worker:1", "*": "worker:0"}, soft=False)
    spread = OVER_SERVERS if case != "batch normalization" else replace(OVER_SERVERS, workers=1)
    wanted = train_plain(case)
    ran = run_process_group(spread, train_spread, case, spread.workers, "", {"graph": config})
    for values in ran.values:
        assert difference(tensors(values), wanted) <= CLOSE


# Frozen parameters ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_program_freezes_and_thaws_the_model_that_it_knows() -> None:
    wanted = train_plain_frozen_in_between()
    for values in run_process_group(GRAPH, train_frozen_in_between, 1).values:
        assert difference(tensors(values), wanted) <= 1e-6


@pytest.mark.slow
def test_layers_have_the_mode_that_the_program_gives_them() -> None:
    (wanted,) = run_process_group(ProcessGroup(), train_with_modes).values
    for values in run_process_group(replace(GRAPH, microbatches=1), train_with_modes).values:
        assert difference(tensors(values), tensors(wanted)) <= CLOSE


@pytest.mark.thorough
def test_what_was_frozen_when_training_began_cannot_be_thawed() -> None:
    ran = run_process_group(GRAPH, unfreeze_alone)
    assert len(ran.raised) == 2
    assert any("'hidden1.weight' requires a gradient now" in said for said in ran.raised.values())


# Hooks ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_hooks_are_called(tmp_path: Path) -> None:
    ran = run_process_group(replace(GRAPH, run_dir=tmp_path), train_with_hooks, str(tmp_path))
    for calls in ran.values:
        assert calls == {"start": 1, "before": STEPS, "after": STEPS, "stop": 1}
    assert list((tmp_path / "tensorboard").rglob("*tfevents*"))


def test_a_schedule_of_pipelines_is_refused() -> None:
    error = refused(train_spread, "MLP", "sgd", {}, spread=replace(GRAPH, schedule="gpipe"))
    assert "schedule is gpipe, and the strategy is graph" in error
