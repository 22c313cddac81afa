"""Checks the site that was built: links, anchors, pictures, and a place for every public name.

    python docs/site_checks.py build/docs/html

`docs/build.py` has checked the links of the sources; this sees what Sphinx made of them, and of the
docstrings. Other sites are not asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

from bs4 import BeautifulSoup
from sphinx.util.inventory import InventoryFile

import trireme
import trireme.data

TARGETS = (("a", "href"), ("img", "src"), ("link", "href"), ("script", "src"))


def main() -> int:
    """Returns 0 if all is well, else 1."""
    site = Path(sys.argv[1]).resolve()
    pages = sorted(site.rglob("*.html"))
    problems = [problem for page in pages for problem in broken_in(page, site)]
    problems += [f"{name} is on no page of docs/reference" for name in missing_names(site)]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"site: {len(pages)} pages, every link and picture is there")
    return 1 if problems else 0


def broken_in(page: Path, site: Path) -> Iterator[str]:
    """Yields what is wrong with the links of one page."""
    where = page.relative_to(site)
    for link in links(page):
        address, anchor = urldefrag(link)
        if urlsplit(link).scheme:
            if not link.startswith(("http:", "https:", "data:", "mailto:")):
                yield f"{where}: {link} leads nowhere"
            continue
        path = unquote(urlsplit(address).path)
        file = (page.parent / path).resolve() if path else page
        file = file / "index.html" if file.is_dir() else file
        if not file.is_relative_to(site) or not file.exists():
            yield f"{where}: {link} leads to no file of the site"
        elif anchor and file.suffix == ".html" and unquote(anchor) not in anchors(file):
            yield f"{where}: {link} leads to no place of that page"


@cache
def parsed(page: Path) -> BeautifulSoup:
    """Returns a page's elements."""
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


def links(page: Path) -> Iterator[str]:
    """Yields all addresses that a page mentions."""
    for tag, attribute in TARGETS:
        for element in parsed(page).find_all(tag):
            if address := element.get(attribute):
                yield str(address)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the places of a page that links may lead to."""
    named = [element["id"] for element in parsed(page).find_all(id=True)]
    named += [element["name"] for element in parsed(page).find_all("a", attrs={"name": True})]
    return frozenset(map(str, named))


def missing_names(site: Path) -> list[str]:
    """Returns the public names that the reference does not have."""
    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    known = {name for domain in inventory.values() for name in domain}
    public = [f"trireme.{name}" for name in trireme.__all__]
    public += [f"trireme.data.{name}" for name in trireme.data.__all__]
    public.append("trireme.models.MLP")
    aliases = {name: name.replace("trireme.", "trireme.errors.", 1) for name in public}
    return [name for name in public if name not in known and aliases[name] not in known]


if __name__ == "__main__":
    sys.exit(main())
