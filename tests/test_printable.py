from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from trireme.printable import printable


def test_what_a_terminal_obeys_is_escaped() -> None:
    assert printable("a\x1b[2Jb\nc\rd\x07\x7f\x9b1m") == r"a\x1b[2Jb\x0ac\x0dd\x07\x7f\x9b1m"


def test_marks_that_reverse_what_is_read_are_escaped() -> None:
    assert printable("exe.\u202etxt\u2066\u2028\udc80") == r"exe.\u202etxt\u2066\u2028\udc80"


def test_words_of_any_language_stay() -> None:
    text = "worker:0\tRuderschiff 三桨座战船 👩\u200d🚀 \\x1b"
    assert printable(text) == text


def test_lines_stay_where_they_are_wanted() -> None:
    assert printable("one\ntwo\r\n", keep="\n") == "one\ntwo\\x0d\n"


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    shown = printable(text)
    assert not {
        each for each in shown if unicodedata.category(each) in ("Cc", "Zl", "Zp", "Cs")
    } - {"\t"}
    assert printable(shown) == shown
