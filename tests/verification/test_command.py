from __future__ import annotations

import json
from pathlib import Path

import pytest

import trireme
from trireme.cli import main
from trireme.verification.compare import Comparison, Difference
from trireme.verification.page import page
from trireme.verification.verdict import Exact, Verdict, exit_status

FOUND = Comparison(
    (1, 2), (Difference(2, "values", "net.0.weight", 1.0, 2.0, 0.5, 1e-6),), {1: 0.0, 2: 0.25}, 1e-6
)
DIFFERS = Verdict(
    "sync, 2 workers",
    "differs",
    reason="<because>",
    comparison=FOUND,
    exact=Exact((3, 1), 1.0, 2.0),
)
SAME = Verdict("fsdp", "same", comparison=Comparison((1, 2), (), {1: 0.0, 2: 1e-9}, 1e-6))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name the program to verify"),
        (("--steps", "0", "PROGRAM"), "--steps is '0': it must be a whole number from 1"),
        (("--stop-at", "20", "PROGRAM"), "--stop-at 20: it must be below --steps, which is 20"),
        (("--strategies", "sync", "PROGRAM"), "--strategies is 'sync': it must be all"),
        (("--tolerance", "much", "PROGRAM"), "--tolerance is 'much'"),
        (("--workers", "0", "PROGRAM"), "workers is '0'"),
        (("missing.py",), "there is no program missing.py"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.touch()
    given = [str(program) if each == "PROGRAM" else each for each in arguments]
    assert main(["verify", *given]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_exit_status() -> None:
    refused, failed, apart = (Verdict("x", o) for o in ("refused", "failed", "apart"))
    assert exit_status([SAME, apart, refused]) == 0
    assert exit_status([SAME, failed]) == 3
    assert exit_status([refused]) == 3
    assert exit_status([DIFFERS, failed]) == 1


def test_a_verdict_in_words() -> None:
    assert list(DIFFERS.lines()) == [
        "sync, 2 workers: DIFFERS from one process",
        "  first: step 2, the values of net.0.weight "
        "(2.5e-01 of its norm apart; 5.0e-07 is allowed)",
        "  most at element [3, 1]: 1 in the job, 2 in one process",
        "  why: <because>",
        "  values at the end: 2.5e-01 apart, relative to how far training has moved them; "
        "tolerance of gradients 1.0e-06",
    ]
    assert next(SAME.lines()) == "fsdp: the same as one process, in 2 steps"


def test_a_verdict_goes_through_json() -> None:
    assert Verdict.from_dict(json.loads(json.dumps(DIFFERS.as_dict()))) == DIFFERS


def test_the_page_needs_no_network_and_trusts_no_text() -> None:
    text = page("train.py --name <b>", [DIFFERS, SAME, Verdict("graph", "refused", reason="no")])
    assert "&lt;because&gt;" in text
    assert "&lt;b&gt;" in text
    assert text.count("<polyline") == 2
    assert "http" not in text


def test_options_of_the_call_are_checked() -> None:
    for options in ({"steps": 0}, {"stop_at": 30}, {"worker": 2}):
        with pytest.raises(trireme.ConfigurationError):
            trireme.verify("program.py", **options)  # type: ignore[arg-type]


def train(rate: float) -> None:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    session = trireme.Session(
        lambda: nn.Linear(3, 1), nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=rate), max_steps=9
    )
    with session:
        for batch in session.loader(TensorDataset(x, x.sum(1, keepdim=True)), 4):
            session.step(batch)


@pytest.mark.processes
@pytest.mark.thorough
def test_a_function_is_verified() -> None:
    verdict = trireme.verify(train, args=(0.1,), workers=2, ps=1, strategy="sync", steps=3)
    assert verdict.outcome == "same", verdict
    assert verdict.comparison is not None
    assert verdict.comparison.steps == (1, 2, 3)
