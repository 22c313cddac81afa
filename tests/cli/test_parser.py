from __future__ import annotations

import pytest

from trireme.cli.command import COMMANDS, Parser
from trireme.cli.dispatch import overview
from trireme.errors import UsageError


@pytest.fixture
def run() -> Parser:
    return COMMANDS.load("run").parser()


@pytest.mark.parametrize(
    ("words", "head", "program"),
    [
        (["a.py"], [], ["a.py"]),
        (["--ps", "1", "a.py", "--ps", "2"], ["--ps", "1"], ["a.py", "--ps", "2"]),
        (["--ps=1", "a.py", "--", "--x"], ["--ps=1"], ["a.py", "--", "--x"]),
        (["--dry-run", "a.py"], ["--dry-run"], ["a.py"]),
        (["--max_restarts", "a_b", "x_y.py"], ["--max-restarts", "a_b"], ["x_y.py"]),
        (["--run_dir=a_b", "x_y.py", "--a_b"], ["--run-dir=a_b"], ["x_y.py", "--a_b"]),
        (["--", "--odd.py"], [], ["--odd.py"]),
        (["--ps", "1", "-m", "a.b", "--ps", "2"], ["--ps", "1"], ["-m", "a.b", "--ps", "2"]),
        (["--ps"], ["--ps"], []),
        ([], [], []),
    ],
)
def test_a_program_s_own_words_are_left_alone(run, words, head, program) -> None:
    assert run.split(words) == (head, program)


@pytest.mark.parametrize(
    ("words", "close"),
    [
        (["--worker", "2", "a.py"], "--workers"),
        (["--stratgy=sync"], "--strategy"),
        (["--dryrun", "a.py"], "--dry-run"),
        (["--maxrestarts", "1"], "--max-restarts"),
    ],
)
def test_an_unknown_option_suggests_a_known_one(run: Parser, words: list[str], close: str) -> None:
    with pytest.raises(UsageError, match=rf"no option --.* \(did you mean {close}\?\)"):
        run.split(words)


def test_options_are_not_abbreviated(run: Parser) -> None:
    with pytest.raises(UsageError, match="no option --work"):
        run.split(["--work", "2"])


def test_a_missing_value_is_an_error_of_ours(run: Parser) -> None:
    with pytest.raises(UsageError, match="--ps"):
        run.parse_args(run.split(["--ps"])[0])


def test_a_command_without_a_program_takes_options_anywhere() -> None:
    parser = COMMANDS.load("checkpoint").parser()
    given = parser.read(["show", "runs/x", "--step", "7"])
    assert (given.action, given.run, given.step) == ("show", "runs/x", "7")
    assert parser.read(["--step", "7", "show", "runs/x"]) == given
    with pytest.raises(UsageError, match="unrecognized arguments: more"):
        parser.read(["show", "runs/x", "more"])
    with pytest.raises(UsageError, match="RUN"):
        parser.read(["show"])


@pytest.mark.parametrize("words", [["--sync_replicas"], ["--sync_replicas=true"]])
def test_a_classic_switch_may_have_a_value_after_an_equals_sign(words: list[str]) -> None:
    parser = COMMANDS.load("task").parser()
    head, program = parser.split([*words, "train.py"])
    assert program == ["train.py"]
    assert parser.parse_args(head).sync_replicas == "true"


def test_help_lists_every_command() -> None:
    listed = {line.split()[0] for line in overview().splitlines() if line.startswith("  ")}
    assert set(COMMANDS) <= listed
    for command in COMMANDS.all().values():
        text = command.parser().format_help()
        assert max(map(len, text.splitlines())) <= 100
