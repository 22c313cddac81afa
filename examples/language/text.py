"""Text for language models: one sentence a line, numbered words, windows of consecutive text.

The corpus that is always there is the English in the pages of Python's own `help()`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import TensorDataset

from trireme.errors import DataError

EOS = "<eos>"
"""Stands at the end of each line."""

UNKNOWN = "<unk>"
"""Stands for each word that is not in the vocabulary."""

FILES = (("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"), ("train.txt", "valid.txt", "test.txt"))
"""The names that a corpus's training, validation and test file may have."""

_BLOCK = 20  # sentences of the built-in corpus that stay together
_FEWEST_WORDS = 4
_PARAGRAPH = re.compile(r"\n\s*[*+-]\s+|\n\s*\n")  # \s takes empty lines before a bullet, too
_SENTENCE_END = re.compile(r"(?<=[.?!:])[\"')]*\s+(?=[A-Z])")
_WORD = re.compile(r"\d[\d.,]*|\w+(?:['.]\w+)*")

Sentences = Sequence[Sequence[str]]


class Vocabulary:
    """Maps words to numbers.

    Attributes:
        words: the words by number, with `<unk>` and `<eos>`.
    """

    def __init__(self, words: Iterable[str]) -> None:
        """Numbers words in the order in which they come.

        Raises:
            ValueError: a word comes twice, is empty or has white space in it, or `<unk>` or
                `<eos>` is missing.
        """
        self.words = tuple(words)
        self._numbers = {word: number for number, word in enumerate(self.words)}
        if len(self._numbers) != len(self.words):
            twice = [word for word, count in Counter(self.words).items() if count > 1]
            raise ValueError(f"the vocabulary has {twice[0]!r} more than once")
        for word in self.words:
            if word.split() != [word]:
                raise ValueError(f"{word!r} is no word: it is empty, or has white space in it")
        for mark in (UNKNOWN, EOS):
            if mark not in self._numbers:
                raise ValueError(f"the vocabulary has no {mark}")

    @classmethod
    def of(cls, sentences: Sentences, size: int = 10_000) -> Vocabulary:
        """Returns the `size` most frequent words, `<unk>` and `<eos>` among them and first.

        Of words that are equally frequent, the first in the alphabet is taken.

        Raises:
            ValueError: `size` is below 2.
        """
        if size < 2:
            raise ValueError(f"a vocabulary of {size} words: {UNKNOWN} and {EOS} are two already")
        counts = Counter(word for sentence in sentences for word in sentence)
        ranked = sorted(counts.keys() - {UNKNOWN, EOS}, key=lambda word: (-counts[word], word))
        return cls((UNKNOWN, EOS, *ranked[: size - 2]))

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.words == other.words

    def __hash__(self) -> int:
        return hash(self.words)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} words)"

    def encode(self, words: Iterable[str]) -> torch.Tensor:
        """Returns the numbers of words, int64; an unknown word has the number of `<unk>`."""
        unknown = self._numbers[UNKNOWN]
        numbers = [self._numbers.get(word, unknown) for word in words]
        return torch.tensor(numbers, dtype=torch.int64)

    def encode_lines(self, sentences: Sentences) -> torch.Tensor:
        """Returns the numbers of all sentences, one after the other, an `<eos>` after each."""
        return self.encode(word for sentence in sentences for word in (*sentence, EOS))

    def decode(self, numbers: torch.Tensor | Iterable[int]) -> list[str]:
        """Returns the words of these numbers."""
        return [self.words[int(number)] for number in numbers]

    def save(self, path: str | Path) -> None:
        """Writes the words to a text file, one a line, in their order."""
        Path(path).write_text("".join(f"{word}\n" for word in self.words), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Reads what `save` wrote.

        Raises:
            DataError: the file cannot be read, or is no vocabulary; names it.
        """
        try:
            return cls(_text(Path(path)).removesuffix("\n").split("\n"))
        except ValueError as error:
            raise DataError(f"{path} is no vocabulary, one word a line: {error}") from error


class TextWindows(TensorDataset):
    """Windows of consecutive text: (tokens, next tokens), each int64 of shape (length,).

    The text is cut into `lanes` equally long pieces, read side by side: window t * lanes + l is
    the t-th of piece l. So batches of `lanes` examples, taken in order, go through the text: row l
    of a batch goes on where row l of the batch before it ended, as truncated back-propagation
    through time wants it. n workers that each take `lanes` / n at a time, in turns, have that too.
    What is left over at the end, fewer than `lanes` windows, is not used.

    It is a data set of tensors in memory, which loaders gather without per-example Python.

    Attributes:
        length: tokens in a window.
        lanes: how many pieces there are.
        steps: windows in each piece.
    """

    def __init__(self, tokens: torch.Tensor, length: int, lanes: int = 1) -> None:
        """Cuts a text.

        Args:
            tokens: int64, of shape (count,).
            length: tokens in a window.
            lanes: how many pieces to read side by side.

        Raises:
            ValueError: a number is below 1, or the text is too short for one window a lane.
        """
        if length < 1 or lanes < 1:
            raise ValueError(f"length={length}, lanes={lanes}: both start at 1")
        steps = (len(tokens) - 1) // lanes // length
        if steps < 1:
            raise ValueError(
                f"{len(tokens)} tokens are too few for {lanes} pieces of {length} and one to "
                "predict: take shorter windows, or fewer of them side by side"
            )
        self.length, self.lanes, self.steps = length, lanes, steps
        # The last token of a window, which is only predicted, is the first of the next.
        windows = tokens[: lanes * steps * length + 1].unfold(0, length + 1, length)
        rows = windows.view(lanes, steps, length + 1).transpose(0, 1).flatten(0, 1)
        super().__init__(rows[:, :-1], rows[:, 1:])

    def follows(self, before: tuple[int, int] | None, span: tuple[int, int]) -> bool:
        """Returns whether a batch continues, row by row, another batch.

        Args:
            before: the positions [start, stop) of the batch before, in an order that is not
                shuffled; None for none.
            span: those of this batch.
        """
        if before is None or before[1] - before[0] != span[1] - span[0]:
            return False
        one_epoch = before[0] // len(self) == (span[1] - 1) // len(self)
        return one_epoch and span[0] - before[0] == self.lanes


class Corpus(NamedTuple):
    """A text in three parts, as numbers.

    Attributes:
        train: the training text, int64 of shape (tokens,).
        validation: the validation text, in the same form.
        test: the test text, in the same form.
        vocabulary: maps the numbers to words.
    """

    train: torch.Tensor
    validation: torch.Tensor
    test: torch.Tensor
    vocabulary: Vocabulary


def load(data_dir: str | Path | None = None, *, vocabulary_size: int = 10_000) -> Corpus:
    """Reads a corpus and numbers its words.

    Args:
        data_dir: has `ptb.train.txt`, `ptb.valid.txt` and `ptb.test.txt`, or the same without
            `ptb.`: one sentence a line, words separated by spaces. None: the English in the pages
            of Python's `help()`, without code and punctuation, in lower case, numbers as `N`, no
            sentence twice; about 40,000 words, a few more or less in each version of Python.
        vocabulary_size: how many words of the training text get a number of their own, `<unk>`
            and `<eos>` counted; the most frequent ones.

    Returns:
        Training, validation and test text, and the vocabulary.

    Raises:
        DataError: a file is missing, empty, or no text in UTF-8; says which and what to do.
        ValueError: `vocabulary_size` is below 2.
    """
    parts = _parts_of_help() if data_dir is None else [read(path) for path in _find(Path(data_dir))]
    vocabulary = Vocabulary.of(parts[0], vocabulary_size)
    train, validation, test = (vocabulary.encode_lines(part) for part in parts)
    return Corpus(train, validation, test, vocabulary)


def read(path: str | Path) -> list[list[str]]:
    """Reads a text of one sentence a line: the words of each line that has some.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or has no words.
    """
    sentences = [words for line in _text(Path(path)).split("\n") if (words := line.split())]
    if not sentences:
        raise DataError(f"{path} has no words: one sentence a line is wanted. Get it again.")
    return sentences


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}. "
            "It is packed, damaged, or in another encoding: unpack or convert it."
        ) from error


def _find(directory: Path) -> list[Path]:
    choices = [[directory / name for name in names] for names in FILES]
    for paths in choices:
        if all(path.is_file() for path in paths):
            return paths
    for paths in choices:
        missing = [path.name for path in paths if not path.is_file()]
        if len(missing) < len(paths):
            raise DataError(
                f"{directory} has no {' and no '.join(missing)}: a corpus is the files "
                f"{', '.join(path.name for path in paths)}"
            )
    raise DataError(
        f"{directory} is no directory with {', or with '.join(', '.join(f) for f in FILES)}: one "
        "sentence a line, words separated by spaces. Put the files there, or give no directory: "
        "then the text that ships with Python is read."
    )


def _parts_of_help() -> list[list[list[str]]]:
    """Returns the three parts: of ten blocks of sentences, eight are training text."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python comes without the pages of help() (the module pydoc_data): install your "
            "system's full Python, or give a directory with a corpus"
        ) from error
    sentences = list(_sentences(topics[name] for name in sorted(topics)))
    parts: list[list[list[str]]] = [[], [], []]
    for number, sentence in enumerate(sentences):
        parts[max(0, number // _BLOCK % 10 - 7)].append(sentence)
    return parts


def _sentences(pages: Iterable[str]) -> Iterator[list[str]]:
    """Yields the words of each English sentence, once; pages quote each other at length."""
    seen = set()
    for page in pages:
        for paragraph in _PARAGRAPH.split(page.replace("\u2019", "'")):
            for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
                words = _words(sentence)
                if words and (key := tuple(words)) not in seen:
                    seen.add(key)
                    yield words


def _words(sentence: str) -> list[str]:
    """Returns the words of a text that is a sentence; none of code, tables and titles."""
    if not sentence[:1].isupper() or sentence.rstrip("\"')")[-1:] not in (".", "?", "!", ":"):
        return []
    words = ["N" if word[0].isdigit() else word.lower() for word in _WORD.findall(sentence)]
    return words if len(words) >= _FEWEST_WORDS else []
