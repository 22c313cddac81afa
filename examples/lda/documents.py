"""Documents as bags of words, and the corpus of English text that ships with Python."""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trireme.errors import DataError

_WORD = re.compile(r"[a-z]{3,}")
_FEWEST_WORDS = 20
_PARAGRAPH = re.compile(r"\n\s*\n")
_HELD_OUT = 10  # every tenth document
_LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "lib2to3", "encodings", "turtledemo"}
_COMMON = """
all also and any are because been being but can cannot could did does done each either
else for from had has have her here him his how into its itself like made make makes
many may might more most must neither nor not now off once one only onto other others
our out over own rather same see shall she should since some such than that the their
them then there these they this those though three through thus too two under until upon
use used uses using very via was way well were what when where whether which while who
whom whose why will with within without would yes yet you your
"""
COMMON = frozenset(_COMMON.split())
"""Frequent words that have no topic: left out of documents unless the caller says otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Documents, one after the other: document d is words[offsets[d]:offsets[d + 1]].

    Attributes:
        offsets: int64 of shape (documents + 1,); the first is 0, the last the number of tokens.
        words: int32 of shape (tokens,): the numbers of the words.
        vocabulary: the words by number.
    """

    offsets: npt.NDArray[np.int64]
    words: npt.NDArray[np.int32]
    vocabulary: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]], vocabulary: Sequence[str]) -> Documents:
        """Returns documents of numbered words.

        Args:
            documents: the numbers of each document's words.
            vocabulary: the words by number.

        Raises:
            ValueError: a number is not one of a word.
        """
        arrays = [np.asarray(document, np.int32) for document in documents]
        words = np.concatenate([np.empty(0, np.int32), *arrays])
        if len(words) and not (words.min() >= 0 and words.max() < len(vocabulary)):
            raise ValueError(
                f"a word's number is not one of the {len(vocabulary)} of the vocabulary"
            )
        lengths = np.array([0, *map(len, arrays)], np.int64)
        return cls(np.cumsum(lengths), words, tuple(vocabulary))

    def take(self, numbers: Sequence[int] | npt.NDArray[np.int64]) -> Documents:
        """Returns some of the documents, by number."""
        parts = [self.words[self.offsets[n] : self.offsets[n + 1]] for n in numbers]
        lengths = np.array([0, *map(len, parts)], np.int64)
        words = np.concatenate([np.empty(0, np.int32), *parts])
        return Documents(np.cumsum(lengths), words, self.vocabulary)

    def between(self, first: int, after: int) -> Documents:
        """Returns consecutive documents, from number `first` to before number `after`.

        Their words are a view.
        """
        offsets = self.offsets[first : after + 1]
        words = self.words[offsets[0] : offsets[-1]]
        return Documents(offsets - offsets[0], words, self.vocabulary)

    def shard(self, num_shards: int, index: int) -> Documents:
        """Returns every `num_shards`-th document, beginning with number `index`."""
        return self.take(np.arange(index, len(self), num_shards))


def number_words(
    texts: Iterable[str],
    *,
    most_words: int = 20_000,
    fewest_documents: int = 5,
    most_documents: float = 0.2,
    leave_out: frozenset[str] = COMMON,
) -> Documents:
    """Makes documents of texts: lower case, words of three letters of a to z or more.

    Args:
        texts: the text of each document.
        most_words: the size of the vocabulary: the most frequent words are taken.
        fewest_documents: words in fewer documents are left out.
        most_documents: words in more than this share of the documents are left out.
        leave_out: these words are left out.

    Returns:
        The documents, words numbered by falling frequency. A document may be empty.
    """
    split = [_WORD.findall(text.lower()) for text in texts]
    within = Counter(word for words in split for word in set(words))
    total = Counter(word for words in split for word in words)
    limit = most_documents * len(split)
    kept = [w for w, n in within.items() if fewest_documents <= n <= limit and w not in leave_out]
    vocabulary = sorted(kept, key=lambda word: (-total[word], word))[:most_words]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    return Documents.of(
        ([numbers[word] for word in words if word in numbers] for words in split), vocabulary
    )


def hold_out(documents: Documents, every: int = _HELD_OUT) -> tuple[Documents, Documents]:
    """Divides documents into those to train on and every n-th to be held out."""
    numbers = np.arange(len(documents))
    held = numbers % every == every - 1
    return documents.take(numbers[~held]), documents.take(numbers[held])


def of_python() -> Documents:
    """Returns the English text that ships with Python, about 150,000 tokens in 2,000 documents.

    Documents are the pages of `help()`, the paragraphs of the licence, and the docstrings of the
    standard library: of a module, of a function, and of a class with its methods; none with fewer
    than 20 words. The files are parsed, not imported. The corpus is a little different in each
    version of Python.

    Raises:
        DataError: this Python comes without its standard library's source.
    """
    texts = [*_pages(), *_license(), *_docstrings()]
    long = [text for text in texts if len(_WORD.findall(text.lower())) >= _FEWEST_WORDS]
    if not long:
        raise DataError(
            "this Python comes without the source of its standard library: install your system's "
            "full Python, or give a file with one document a line"
        )
    return number_words(dict.fromkeys(long))


def read(path: str | Path) -> Documents:
    """Reads a text file of one document a line.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or has no words.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8: unpack or convert it") from error
    documents = number_words(lines)
    if not len(documents.words):
        raise DataError(
            f"{path} has no words that come in five lines: one document a line is wanted"
        )
    return documents


def _pages() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name in sorted(topics):
        yield topics[name]


def _license() -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in (folder / "LICENSE.txt", folder.parent.parent / "LICENSE.txt"):
        if path.is_file():
            yield from _PARAGRAPH.split(path.read_text(encoding="utf-8", errors="replace"))
            return


def _docstrings() -> Iterator[str]:
    """Yields the documents of the modules of the standard library, in the order of their paths."""
    folder = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        package = folder / name
        files = sorted(package.rglob("*.py")) if package.is_dir() else [folder / f"{name}.py"]
        for path in files:
            within = path.relative_to(folder).parts
            if path.is_file() and not _LEFT_OUT & set(within):
                yield from _docstrings_of(path)


def _docstrings_of(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the module, such as an invalid escape
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # lib2to3 has files of Python 2
    yield ast.get_docstring(tree) or ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found = [ast.get_docstring(node), *map(ast.get_docstring, methods)]
            yield "\n".join(text or "" for text in found)
