"""The words by which pages are found: English ones, and pairs of neighbouring Chinese characters.

Chinese has no spaces between words. Sphinx would take what stands between two punctuation marks for
one word, and nobody finds the term in the middle. With pairs a term is found wherever it stands, as
in the analyzers for such languages (Lucene's CJKBigramFilter), and no dictionary is needed.
"""

from __future__ import annotations

import re

from sphinx.search.en import SearchEnglish

RUN = re.compile(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+")


class SearchEnglishAndChinese(SearchEnglish):
    """Splits pages and queries in the same way."""

    lang = "en-zh"
    language_name = "English"  # the stemmer's, in the script
    js_splitter_code = r"""
var splitQuery = (query) =>
  (query.match(/[\u4e00-\u9fff]+|(?:(?![\u4e00-\u9fff])[\p{Letter}\p{Number}_])+/gu) || []).flatMap(
    (run) =>
      /^[\u4e00-\u9fff]{2,}$/.test(run)
        ? Array.from({ length: run.length - 1 }, (_, i) => run.slice(i, i + 2))
        : [run],
  );
"""

    def split(self, input: str) -> list[str]:
        """Returns the English words and the pairs of Chinese characters of a text."""
        return [word for run in RUN.findall(input) for word in pairs(run)]


def pairs(run: str) -> list[str]:
    """Returns the pairs of neighbours in a run of Chinese characters; any other run as it is."""
    if len(run) < 2 or not "\u4e00" <= run[0] <= "\u9fff":
        return [run]
    return [run[i : i + 2] for i in range(len(run) - 1)]
