"""Documents: numbered words, parts, files, and the text that Python brings."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from lda import documents
from lda.documents import Documents, hold_out, number_words

from trireme.errors import DataError

TEXTS = ["The parser reads tokens, tokens!", "A parser is a reader.", "Tokens of the grammar"]


def words_of(made: Documents) -> list[list[str]]:
    bounds = made.offsets.tolist()
    return [
        [made.vocabulary[number] for number in made.words[start:stop]]
        for start, stop in pairwise(bounds)
    ]


def test_words_are_numbered_by_frequency() -> None:
    made = number_words(TEXTS, fewest_documents=1, most_documents=1.0)
    assert made.vocabulary == ("tokens", "parser", "grammar", "reader", "reads")
    assert words_of(made) == [
        ["parser", "reads", "tokens", "tokens"],
        ["parser", "reader"],
        ["tokens", "grammar"],
    ]


def test_rare_and_common_words_are_left_out() -> None:
    assert number_words(TEXTS, fewest_documents=2, most_documents=1.0).vocabulary == (
        "tokens",
        "parser",
    )
    assert number_words(TEXTS, fewest_documents=1, most_documents=0.5).vocabulary == (
        "grammar",
        "reader",
        "reads",
    )
    assert number_words(TEXTS, fewest_documents=1, most_documents=1.0, most_words=1).vocabulary == (
        "tokens",
    )
    assert "the" in number_words(
        TEXTS, fewest_documents=1, most_documents=1.0, leave_out=frozenset()
    ).vocabulary  # fmt: skip


def test_parts() -> None:
    made = Documents.of([[0], [1, 1], [], [2]], ("a", "b", "c"))
    assert len(made) == 4
    assert words_of(made.take([3, 1])) == [["c"], ["b", "b"]]
    assert [words_of(made.shard(2, n)) for n in range(2)] == [[["a"], []], [["b", "b"], ["c"]]]
    train, held = hold_out(made, 2)
    assert (words_of(train), words_of(held)) == ([["a"], []], [["b", "b"], ["c"]])
    assert words_of(made.take([])) == []


def test_a_number_that_is_no_words() -> None:
    with pytest.raises(ValueError, match="not one of the 2 of the vocabulary"):
        Documents.of([[0, 2]], ("a", "b"))


def test_a_file_of_one_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("server and worker\nserver\n" * 5 + "nothing\n" * 40)
    made = documents.read(path)
    assert made.vocabulary == ("server", "worker")
    path.write_text("nothing much\n")
    with pytest.raises(DataError, match="has no words that come in five lines"):
        documents.read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="no text in UTF-8"):
        documents.read(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        documents.read(tmp_path / "nothing")


@pytest.mark.thorough
def test_the_text_that_python_brings() -> None:
    made = documents.of_python()
    assert len(made) > 1000 and len(made.words) > 80_000 and len(made.vocabulary) > 1500
    assert {"socket", "thread", "license", "decimal"} <= set(made.vocabulary)
