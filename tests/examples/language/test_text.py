"""Text: vocabularies, windows in lanes, the corpus that Python brings, and files."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from language import text
from language.text import EOS, UNKNOWN, TextWindows, Vocabulary

from trireme.data.ledger import Ledger
from trireme.data.loader import Loader, tensors_of
from trireme.data.order import Order
from trireme.errors import DataError

LINES = ["the cat sat", "the dog sat", "a cat"]
SENTENCES = [line.split() for line in LINES]


# Vocabulary --------------------------------------------------------------------------------------


def test_the_most_frequent_words_are_taken() -> None:
    vocabulary = Vocabulary.of(SENTENCES)
    assert vocabulary.words == (UNKNOWN, EOS, "cat", "sat", "the", "a", "dog")
    assert Vocabulary.of(SENTENCES, 4).words == (UNKNOWN, EOS, "cat", "sat")
    assert len(vocabulary) == 7
    assert "dog" in vocabulary
    assert "bird" not in vocabulary


def test_marks_in_the_text_are_the_vocabularys_own() -> None:
    vocabulary = Vocabulary.of([["a", UNKNOWN, UNKNOWN, EOS]])
    assert vocabulary.words == (UNKNOWN, EOS, "a")


def test_there_and_back_again() -> None:
    vocabulary = Vocabulary.of(SENTENCES)
    numbers = vocabulary.encode_lines([["a", "bird", "sat"], ["the"]])
    assert numbers.dtype == torch.int64
    assert numbers.tolist() == [5, 0, 3, 1, 4, 1]
    assert vocabulary.decode(numbers) == ["a", UNKNOWN, "sat", EOS, "the", EOS]
    assert vocabulary.encode([]).dtype == torch.int64


def test_saved_and_loaded(tmp_path: Path) -> None:
    vocabulary = Vocabulary.of([*SENTENCES, ["größe", "naïve", "\N{SNOWMAN}"]])
    path = tmp_path / "words.txt"
    vocabulary.save(path)
    assert path.read_text(encoding="utf-8").startswith("<unk>\n<eos>\ncat\n")
    assert Vocabulary.load(path) == vocabulary
    assert hash(Vocabulary.load(path)) == hash(vocabulary)
    assert Vocabulary.load(path) != Vocabulary.of(SENTENCES)


def test_what_is_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a' more than once"):
        Vocabulary([UNKNOWN, EOS, "a", "a"])
    with pytest.raises(ValueError, match="no <eos>"):
        Vocabulary([UNKNOWN, "a"])
    with pytest.raises(ValueError, match="'b c' is no word"):
        Vocabulary([UNKNOWN, EOS, "b c"])
    with pytest.raises(ValueError, match="a vocabulary of 1 words"):
        Vocabulary.of(SENTENCES, 1)
    path = tmp_path / "words.txt"
    for content in ("", "a\n", "<unk>\n<eos>\n\n", "<unk>\n<eos>\na b\n"):
        path.write_text(content)
        with pytest.raises(DataError, match=r"words\.txt is no vocabulary, one word a line"):
            Vocabulary.load(path)
    with pytest.raises(DataError, match=r"other\.txt cannot be read: No such file"):
        Vocabulary.load(tmp_path / "other.txt")


# Windows -----------------------------------------------------------------------------------------


def test_one_lane_is_the_text_in_order() -> None:
    windows = TextWindows(torch.arange(12), 3)
    assert (len(windows), windows.steps) == (3, 3)
    inputs, targets = windows[1]
    assert (inputs.tolist(), targets.tolist()) == ([3, 4, 5], [4, 5, 6])
    # A thirteenth token is needed only as what comes next.
    assert len(TextWindows(torch.arange(13), 3)) == 4


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_each_row_goes_on_in_the_next_batch(lanes: int) -> None:
    count, length = 103, 4
    windows = TextWindows(torch.arange(count), length, lanes)
    assert windows.steps == (count - 1) // lanes // length
    assert len(windows) == windows.steps * lanes
    inputs, targets = windows.tensors
    assert torch.equal(targets, inputs + 1)
    by_lane = inputs.view(windows.steps, lanes, length).transpose(0, 1).reshape(lanes, -1)
    piece = windows.steps * length
    assert torch.equal(by_lane, torch.arange(piece) + piece * torch.arange(lanes)[:, None])


def test_too_short_a_text() -> None:
    assert len(TextWindows(torch.arange(13), 4, 3)) == 3
    with pytest.raises(ValueError, match="12 tokens are too few for 3 pieces of 4"):
        TextWindows(torch.arange(12), 4, 3)
    for length, lanes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"length={length}, lanes={lanes}: both start at 1"):
            TextWindows(torch.arange(12), length, lanes)


def test_a_text_that_is_a_view() -> None:
    tokens = torch.arange(40)
    windows = TextWindows(tokens[1::2], 3, 2)
    assert windows[1][0].tolist() == [19, 21, 23]


def test_loaders_gather_windows_without_python() -> None:
    windows = TextWindows(torch.arange(100), 5, 2)
    assert tensors_of(windows) == windows.tensors
    spans = iter([(0, 2), (2, 4)])
    order = Order(len(windows), shuffle=False)
    loader = Loader(
        windows, order, lambda count: [s for s in (next(spans, None),) if s], batch_size=2
    )
    first, second = (batch[0] for batch in loader)
    assert torch.equal(second, first + 5)
    assert first.is_contiguous()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_worker_of_a_synchronous_job_reads_consecutive_text(workers: int) -> None:
    batch = 2
    windows = TextWindows(torch.arange(200), 4, batch * workers)
    ledger = Ledger(len(windows), interleave=True)
    ledger.members(range(workers))
    order = Order(len(windows), shuffle=False)
    begun = 0
    for worker in range(workers):
        before, ended = None, None
        for span in ledger.lease(worker, batch, 2 * windows.steps):
            rows = windows.tensors[0][order.indices(*span)]
            if windows.follows(before, span):
                assert torch.equal(rows[:, 0], ended + 1)
            else:
                begun += 1
                assert torch.equal(rows[:, 0] % (windows.steps * 4), torch.zeros(batch))
            before, ended = span, rows[:, -1]
    assert begun == 2 * workers, "at the beginning of each epoch, and only there"


def test_what_does_not_follow() -> None:
    windows = TextWindows(torch.arange(81), 4, 4)  # five steps of four lanes
    assert windows.follows((0, 4), (4, 8))
    assert windows.follows((2, 4), (6, 8))
    assert windows.follows((24, 28), (28, 32)), "the second epoch"
    assert not windows.follows(None, (0, 4))
    assert not windows.follows((0, 4), (8, 12)), "one was left out"
    assert not windows.follows((4, 8), (4, 8)), "dealt again"
    assert not windows.follows((0, 4), (4, 7)), "fewer rows"
    assert not windows.follows((16, 20), (20, 24)), "the next epoch"
    assert not windows.follows((14, 18), (18, 22)), "some of its rows are of the next epoch"


# The corpus that Python brings -------------------------------------------------------------------


def test_pythons_own_text() -> None:
    corpus = text.load()
    train, validation, test, vocabulary = corpus
    total = sum(len(part) for part in corpus[:3])
    assert 30_000 < total < 100_000
    assert 0.07 < len(validation) / total < 0.13
    assert 0.07 < len(test) / total < 0.13
    assert 1500 < len(vocabulary) < 10_000
    for part in (train, validation, test):
        assert part.dtype == torch.int64
        assert part[-1] == vocabulary.encode([EOS])
    unknown = vocabulary.encode([UNKNOWN]).item()
    assert not (train == unknown).any()
    assert 0 < (test == unknown).float().mean() < 0.1
    common = [vocabulary.words[n] for n, _ in Counter(train.tolist()).most_common(8)]
    assert {"the", "a", "is", "of", "to"} <= set(common)
    again = text.load()
    assert all(torch.equal(a, b) for a, b in zip(corpus[:3], again[:3], strict=True))
    assert again.vocabulary == vocabulary


def test_no_sentence_is_in_two_parts() -> None:
    corpus = text.load()
    end = corpus.vocabulary.encode([EOS]).item()

    def sentences(part: torch.Tensor) -> set[tuple[int, ...]]:
        ends = (part == end).nonzero().flatten().tolist()
        starts = [0, *(stop + 1 for stop in ends)]
        return {tuple(part[a:b].tolist()) for a, b in zip(starts, ends, strict=False)}

    train, validation, test = (sentences(part) for part in corpus[:3])
    unknown = corpus.vocabulary.encode([UNKNOWN]).item()
    for held_out in (validation, test):
        assert not {s for s in held_out & train if unknown not in s}


def test_a_smaller_vocabulary() -> None:
    corpus = text.load(vocabulary_size=500)
    assert len(corpus.vocabulary) == 500
    assert corpus.train.max() == 499
    assert (corpus.train == 0).any()


def test_code_titles_and_tables_are_no_sentences() -> None:
    page = """The "with" statement
********************

The \u201cwith\u201d statement isn\u2019t new, since 3.5 it has 2 items (see PEP 343).  It
ends here.

   with open("x") as f: print("This is no sentence.")

* A list item says this too.

+------+
| Name |

The "with" statement isn't new, since 3.5 it has 2 items (see PEP 343). It ends there, too.
"""
    assert [" ".join(words) for words in text._sentences([page, page])] == [
        "the with statement isn't new since N it has N items see pep N",
        "a list item says this too",
        "it ends there too",
    ]


def test_a_python_without_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="without the pages of help"):
        text.load()


# Files -------------------------------------------------------------------------------------------


@pytest.fixture(params=text.FILES, ids=["ptb", "plain"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    contents = (" the cat sat \n the dog sat \n\n a <unk> \n", " a dog \n", "the bird sat")
    for name, content in zip(request.param, contents, strict=True):
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


def test_files_of_one_sentence_a_line(directory: Path) -> None:
    train, validation, test, vocabulary = text.load(directory)
    assert vocabulary.words == (UNKNOWN, EOS, "sat", "the", "a", "cat", "dog")
    assert " ".join(vocabulary.decode(train)) == "the cat sat <eos> the dog sat <eos> a <unk> <eos>"
    assert " ".join(vocabulary.decode(validation)) == "a dog <eos>"
    assert " ".join(vocabulary.decode(test)) == "the <unk> sat <eos>"
    assert len(text.load(str(directory), vocabulary_size=3).vocabulary) == 3


def test_a_missing_file(directory: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in directory.iterdir())
    (directory / names[0]).unlink()
    with pytest.raises(DataError, match=f"has no {names[0]}: a corpus is the files .*{names[1]}"):
        text.load(directory)
    for nothing in (directory / "not-there", directory / names[1]):
        with pytest.raises(DataError, match=r"ptb\.train\.txt, .* or with train\.txt, valid"):
            text.load(nothing)


def test_files_that_are_no_text(directory: Path) -> None:
    path = max(directory.iterdir())  # the validation file
    path.write_bytes(b"\n \n")
    with pytest.raises(DataError, match=f"{path.name} has no words"):
        text.load(directory)
    path.write_bytes(b"caf\xe9 noir\n")
    with pytest.raises(DataError, match=f"{path.name} is no text in UTF-8: byte 3 is 0xe9"):
        text.load(directory)
