"""A session of a lone process: what programs do with it, and what they do wrong."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LinearLR
from torch.utils.data import DataLoader, TensorDataset

import trireme
from trireme.errors import ConfigurationError, Rejected, UnsupportedOptimizerError
from trireme.session.checkpoint import latest
from trireme.session.hooks import Hook

INPUTS = torch.randn(103, 8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


def make_session(
    model: nn.Module | Callable[[], nn.Module] = make_model, **options: Any
) -> trireme.Session:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)

    return trireme.Session(model, nn.CrossEntropyLoss(), adam, **options)


def saved_model(run_dir: Path) -> dict[str, torch.Tensor]:
    checkpoint = latest(run_dir, lambda path, error: None)
    assert checkpoint is not None
    return dict(checkpoint.model)


@pytest.mark.parametrize(
    "use",
    [
        lambda session: session.step(DATA[:10]),
        lambda session: next(session.loader(DATA, 10)),
        lambda session: session.evaluate(DATA),
        lambda session: session.global_step,
    ],
)
def test_a_session_that_was_not_entered_says_so(use: Callable[[trireme.Session], object]) -> None:
    with pytest.raises(ConfigurationError, match="with session"):
        use(make_session())


def test_a_step_of_a_second_thread_is_refused_before_its_gradient_is_added() -> None:
    class Waiting(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not inside.is_set():
                inside.set()
                assert refused.wait(60.0)
            return super().forward(inputs).sum() * torch.ones(len(inputs))

    inside, refused = threading.Event(), threading.Event()
    model = Waiting(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ones = (torch.ones(4, 1), torch.zeros(4))
    with trireme.Session(
        model, lambda outputs, _: outputs.mean(), torch.optim.SGD(model.parameters(), lr=1.0)
    ) as session:
        first = threading.Thread(target=session.step, args=[ones])
        first.start()
        assert inside.wait(60.0)
        with pytest.raises(ConfigurationError, match="only one thread may call `step`"):
            session.step(ones)
        refused.set()
        first.join()
        assert (session.global_step, model.weight.item()) == (1, -4.0)


def test_a_parameter_in_the_place_of_another_is_refused_before_it_is_not_saved(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(ConfigurationError, match=r"in the place of .2\.weight., which"),
        make_session(run_dir=tmp_path, max_steps=5) as session,
    ):
        session.step(DATA[:10])
        session.model[2].weight = nn.Parameter(torch.ones(2, 4))
        session.step(DATA[:10])
        session.save()
    assert latest(tmp_path, lambda path, error: None) is None


def test_a_process_that_a_program_has_forked_makes_no_steps() -> None:
    with make_session(max_steps=5) as session:
        session.step(DATA[:10])
        child = os.fork()
        if not child:
            try:
                session.step(DATA[:10])
            except ConfigurationError as error:
                os._exit(7 if "was forked" in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_update_after_the_end_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="should_stop"), make_session(max_steps=1) as s:
        for _ in range(2):
            s.step(DATA[:10])


def test_what_is_left_of_the_last_iteration_makes_no_update(tmp_path: Path) -> None:
    """Two steps an iteration, such as those of a GAN, and an end in between."""
    verdicts = []
    with make_session(run_dir=tmp_path, max_steps=5) as session:
        for batch in session.loader(DATA, 10):
            verdicts.append(session.step(batch).verdict)
            last = session.step(batch)
            verdicts.append(last.verdict)
    assert [type(verdict).__name__ for verdict in verdicts] == ["Applied"] * 5 + ["Stale"]
    assert session.global_step == 5 and last.loss > 0
    saved = saved_model(tmp_path)
    assert all(torch.equal(saved[name], p) for name, p in session.model.named_parameters())


@pytest.mark.parametrize("code", [None, 0])
def test_a_program_that_ends_well_inside_the_session_has_saved(
    tmp_path: Path, code: int | None
) -> None:
    with pytest.raises(SystemExit), make_session(run_dir=tmp_path) as session:
        session.step(DATA[:10])
        raise SystemExit(code)
    assert saved_model(tmp_path)


def test_a_loop_that_is_told_of_the_end_and_goes_on_is_told_what_to_do() -> None:
    asked = pytest.raises(ConfigurationError, match="should_stop")
    with asked, make_session(max_steps=1) as session:
        for batch in session.loader(DATA, 10):
            session.step(batch)
            session.step(batch)
        session.step(batch)


def test_batches_taken_apart_count_as_the_loaders(tmp_path: Path) -> None:
    with make_session(run_dir=tmp_path, max_steps=4) as session:
        for inputs, targets in session.loader(DATA, 10):
            session.step((inputs, targets))
    with make_session(run_dir=tmp_path, max_steps=6) as session:
        spans = []
        for batch in session.loader(DATA, 10):
            spans += batch.spans
            session.step(batch)
    assert spans == [(40, 50), (50, 60)]


def test_two_loaders_side_by_side_are_kept_apart(tmp_path: Path) -> None:
    with make_session(run_dir=tmp_path, max_steps=4) as session:
        loaders = session.loader(DATA, 10, name="a"), session.loader(DATA, 20, name="b")
        for first, second in zip(*loaders, strict=False):
            session.step(first)
            session.step(second)
    with make_session(run_dir=tmp_path, max_steps=6) as session:
        assert next(session.loader(DATA, 10, name="a")).spans == ((20, 30),)
        assert next(session.loader(DATA, 20, name="b")).spans == ((40, 60),)


def test_another_loader_goes_on_where_the_first_was_left() -> None:
    spans = []
    with make_session(max_steps=5) as session:
        for batch_size in (10, 10, 4):
            for batch in session.loader(DATA, batch_size):
                spans += batch.spans
                session.step(batch)
                if len(spans) in (2, 4):
                    break
    assert spans == [(0, 10), (10, 20), (20, 30), (30, 40), (40, 44)]


def test_a_frozen_parameter_in_the_optimizer(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        model = make_model()
        next(model.parameters()).requires_grad_(False)
        return model

    for steps in (2, 4):
        with make_session(frozen, run_dir=tmp_path, max_steps=steps) as session:
            before = next(session.model.parameters()).clone()
            for batch in session.loader(DATA, 10):
                session.step(batch)
            assert torch.equal(next(session.model.parameters()), before)
    assert session.restored_from == 2


def test_a_checkpoint_has_what_the_state_dict_has(tmp_path: Path) -> None:
    def with_buffers() -> nn.Module:
        model = make_model()
        model.register_buffer("kept", torch.ones(3))
        model.register_buffer("passing", torch.ones(3), persistent=False)
        return model

    with make_session(with_buffers, run_dir=tmp_path, max_steps=1) as session:
        session.step(DATA[:10])
    with_buffers().load_state_dict(saved_model(tmp_path))


def test_a_scheduler_that_does_not_count_its_steps() -> None:
    def chained(optimizer: torch.optim.Optimizer) -> ChainedScheduler:
        return ChainedScheduler([ExponentialLR(optimizer, 0.5), LinearLR(optimizer, 1.0)])

    with make_session(max_steps=3, scheduler=chained) as session:
        for batch in session.loader(DATA, 10):
            session.step(batch)
    assert session.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**3)


def test_l2_leaves_alone_what_is_frozen_in_the_middle() -> None:
    session = make_session(l2=0.1, max_steps=6)
    with session:
        parameter = next(session.model.parameters())
        for batch in session.loader(DATA, 10):
            if session.global_step == 3:
                parameter.requires_grad_(False)
                before = parameter.detach().clone()
            session.step(batch)
    assert torch.equal(parameter, before)


@pytest.mark.parametrize(
    ("dataset", "batch_size", "options", "says"),
    [
        (iter(DATA), 10, {}, "can be read only once"),
        (object(), 10, {}, "object has no length"),
        (TensorDataset(torch.zeros(0, 8)), 10, {}, "no examples"),
        (DATA, 10, {"epochs": -1}, "above 0"),
        (DATA, 10, {"epochs": 0}, "above 0"),
        (DATA, 0, {}, "batch_size=0: it must be a whole number from 1"),
        (DATA, "4", {}, "batch_size='4': it must be a whole number from 1"),
        (DATA, None, {}, "give the number of examples in a batch"),
        (DATA, 10, {"num_workers": -1}, "num_workers=-1: it must be a whole number, 0 or more"),
        (DATA, 10, {"prefetch_factor": 2}, "num_workers is 0"),
        (DATA, 10, {"shuffle": True, "weights": [1.0] * len(DATA)}, "shuffle and weights: each"),
        (DATA, 10, {"weights": [1.0]}, "there are 1 weights and"),
        (DATA, 10, {"sampler": iter([1, 2])}, "has no length, or can be iterated over only once"),
        (DataLoader(DATA, 10), 10, {}, "the DataLoader has the batch size"),
    ],
)
def test_a_loader_refuses_what_it_cannot_deal(
    dataset: Any, batch_size: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says), make_session() as session:
        session.loader(dataset, batch_size, **options)


MODEL = torch.nn.Linear(8, 2)
LOSS = torch.nn.MSELoss()
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((MODEL, SGD, LOSS), {}, "Session(Linear, SGD, MSELoss): write"),
        ((MODEL, SGD, SGD), {}, "Session(Linear, SGD, SGD): write"),
        ((3, LOSS, SGD), {}, "Session(int, MSELoss, SGD): write"),
        ((MODEL, "mse", SGD), {}, "Session(Linear, str, SGD): write"),
        ((MODEL, LOSS, SGD), {"max_steps": "20"}, "max_steps='20': it must be a whole number"),
        ((MODEL, LOSS, SGD), {"max_steps": 2.5}, "max_steps=2.5: it must be a whole number"),
        ((MODEL, LOSS, SGD), {"seed": "a"}, "seed='a': it must be a whole number"),
        ((MODEL, LOSS, SGD), {"clip_norm": "1"}, "clip_norm='1': it must be above 0"),
        ((MODEL, LOSS, SGD), {"strategy": "snyc"}, "did you mean sync"),
        ((MODEL, LOSS, SGD), {"strategy": 5}, "strategy=5: it must be a name"),
        ((MODEL, LOSS, SGD), {"metrics": trireme.accuracy}, "give a mapping from names"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(
    arguments: tuple[Any, ...], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        trireme.Session(*arguments, **options)


def test_a_hook_that_raises_at_the_start_leaves_nothing_behind() -> None:
    class Broken(Hook):
        def on_start(self, session: trireme.Session) -> None:
            raise ZeroDivisionError

    before = signal.getsignal(signal.SIGINT)
    session = make_session(hooks=[Broken()])
    with pytest.raises(ZeroDivisionError), session:
        pass
    assert signal.getsignal(signal.SIGINT) is before
    assert session.worker.lifecycle.state == "failed"


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"run_dir": tmp_path, "max_steps": 1}
    with trireme.Session(model, nn.CrossEntropyLoss(), sgd, **options) as session:
        session.step(DATA[:10])
    with pytest.raises(Rejected, match="another optimizer"), make_session(run_dir=tmp_path):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"ema": "0.9"},
        {"checkpoint": 100},
        {"accumulate": 2.5},
        {"log_every": "often"},
        {"l2": "much"},
        {"hooks": Hook()},
        {"hooks": [print]},
    ],
)
def test_options_of_a_wrong_kind_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        make_session(**options)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = make_model()
    session = trireme.Session(model, nn.CrossEntropyLoss(), torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS computes the loss several times"):
        session.__enter__()


@pytest.mark.parametrize("batch", [(), [], {}])
def test_a_batch_of_nothing_is_refused(batch: Any) -> None:
    with pytest.raises(ConfigurationError, match="batch"), make_session() as session:
        session.step(batch)


def test_a_checkpoint_has_tied_parameters_under_all_their_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    def session(max_steps: int) -> trireme.Session:
        return trireme.Session(
            Tied,
            nn.MSELoss(),
            lambda params: torch.optim.SGD(params, lr=0.1),
            run_dir=tmp_path,
            max_steps=max_steps,
        )

    with session(2) as first:
        for _ in range(2):
            first.step((torch.ones(3, 4), torch.zeros(3, 4)))
    saved = load_file(tmp_path / "checkpoints" / "step-000000002-writer-1" / "model.safetensors")
    Tied().load_state_dict(saved, strict=True)
    assert torch.equal(saved["a.weight"], first.model.a.weight)
    with session(3) as second:
        assert torch.equal(second.model.a.weight, saved["a.weight"])
        assert second.model.a.weight is second.model.b.weight


def test_a_data_set_of_another_size_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    for steps, examples, resized in ((3, 100, False), (6, 103, True), (7, 103, False)):
        data = TensorDataset(*DATA[:examples])
        if examples == 103 and resized:
            with (
                pytest.raises(Rejected, match=r"had 100 examples .* has 103.*resized=True"),
                make_session(run_dir=tmp_path, max_steps=steps) as session,
            ):
                next(session.loader(data, 10))
        with make_session(run_dir=tmp_path, max_steps=steps) as session:
            spans = []
            for batch in session.loader(data, 10, resized=resized):
                spans += batch.spans
                session.step(batch)
    # The second began with the next epoch of the new data, and the third went on where that was.
    assert spans == [(133, 143)]


def test_a_compiled_model_is_saved_under_its_own_names(tmp_path: Path) -> None:
    def compiled() -> nn.Module:
        model = make_model()
        model.register_buffer("seen", torch.ones(3))
        model[0] = torch.compile(model[0], backend="eager")  # a layer, and then all of it
        return torch.compile(model, backend="eager")  # type: ignore[return-value]

    with make_session(compiled, run_dir=tmp_path, max_steps=2) as session:
        for batch in session.loader(DATA, 10):
            session.step(batch)
    plain = make_model()
    plain.register_buffer("seen", torch.zeros(3))
    plain.load_state_dict(saved_model(tmp_path))
    with make_session(plain, run_dir=tmp_path, max_steps=4) as session:
        for batch in session.loader(DATA, 10):
            session.step(batch)
    with make_session(compiled, run_dir=tmp_path, max_steps=4) as session:
        assert session.restored_from == 4
        assert torch.equal(session.model.state_dict()["_orig_mod.2.weight"], plain[2].weight)


def test_a_skipped_step_leaves_no_trace_in_running_statistics(tmp_path: Path) -> None:
    session = trireme.Session(
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)),
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        nan="skip",
        max_steps=3,
    )
    with session:
        session.step((torch.randn(8, 4), torch.zeros(8, 1)))
        before = {name: b.clone() for name, b in session.model.named_buffers()}
        session.step((torch.full((8, 4), float("nan")), torch.zeros(8, 1)))
        for name, buffer in session.model.named_buffers():
            assert torch.equal(buffer, before[name]), name


def test_a_run_directory_that_cannot_be_made_is_refused_at_once() -> None:
    session = trireme.Session(
        nn.Linear(2, 1),
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        run_dir="/proc/nothing/here",
        max_steps=1,
    )
    with pytest.raises(ConfigurationError, match="run directory"), session:
        raise AssertionError("entered")


def test_an_optimizer_by_name_is_refused() -> None:
    with (
        pytest.raises(ConfigurationError, match="builds one from the parameters"),
        trireme.Session(nn.Linear(2, 1), nn.MSELoss(), "adam", max_steps=1),
    ):
        raise AssertionError("entered")
