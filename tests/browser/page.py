"""A page of TensorBoard in a browser: its elements, wherever they hide, and what it can fetch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

SECONDS = 60.0

# Most of TensorBoard lives in shadow roots and a frame, which no selector looks into.
_DEEP = """
const deep = (selector) => {
  const found = [];
  const walk = (root) => {
    // The trace viewer has its own way to select, which gives nothing while it is built.
    for (const element of Array.from(root.querySelectorAll('*') || [])) {
      if (element.matches(selector)) found.push(element);
      if (element.shadowRoot) walk(element.shadowRoot);
      if (element.contentDocument) walk(element.contentDocument);
    }
  };
  walk(document);
  return found;
};
"""


class Page:
    """One browser on one TensorBoard.

    Args:
        driver: the browser.
        url: TensorBoard's, with a slash at its end.
        pictures: where screenshots go.
    """

    def __init__(self, driver: Chrome, url: str, pictures: Path) -> None:
        self._driver = driver
        self._url = url
        self._pictures = pictures
        self._opened = 0

    def open(self, dashboard: str, tags: str = ".*") -> None:
        """Shows a dashboard, from scratch, with only the tags that match a pattern."""
        self._opened += 1  # another address, or the browser would only move within the page
        self._driver.get(f"{self._url}?visit={self._opened}#{dashboard}&tagFilter={tags}")
        self.wait(
            lambda: self.script("return deep('[role=tab], .mat-mdc-tab, mat-tab').length > 0")
        )

    def script(self, code: str, *arguments: Any) -> Any:
        """Runs JavaScript, in which `deep(selector)` gives elements in shadow roots too."""
        return self._driver.execute_script(_DEEP + code, *arguments)

    def wait(self, reached: Callable[[], Any], what: str = "", seconds: float = SECONDS) -> Any:
        """Waits until something is true; returns it."""
        waiting = WebDriverWait(self._driver, seconds, poll_frequency=0.2)
        return waiting.until(lambda _: reached(), what)

    def elements(self, selector: str) -> list[WebElement]:
        """All elements that match."""
        found: list[WebElement] = self.script("return deep(arguments[0])", selector)
        return found

    def texts(self, selector: str) -> list[str]:
        """What those elements say, of what is not in their shadow roots."""
        found: list[str] = self.script(
            "return deep(arguments[0]).map(e => e.textContent.replace(/\\s+/g, ' ').trim())",
            selector,
        )
        return found

    def all_texts(self, selector: str) -> list[str]:
        """What those elements say, in their shadow roots too."""
        found: list[str] = self.script(
            "return deep(arguments[0]).map(e => (e.textContent + ' ' +"
            " (e.shadowRoot ? e.shadowRoot.textContent : '')).replace(/\\s+/g, ' ').trim())",
            selector,
        )
        return found

    def has_text(self, selector: str, text: str) -> bool:
        """Whether one of those elements says so, among other things."""
        return any(text in found for found in self.all_texts(selector))

    def click(self, selector: str, text: str) -> None:
        """Clicks the one of those elements that says just this, once it is there."""

        def one() -> WebElement | None:
            found = zip(self.elements(selector), self.texts(selector), strict=False)
            return next((element for element, says in found if says == text), None)

        self.script("arguments[0].click()", self.wait(one, f"no {selector} says {text!r}"))

    def choose(self, now: str, text: str) -> None:
        """Chooses something in the list that now says something else, in a frame too."""
        for selector, says in (("mat-select", now), ("mat-option", text)):
            self.wait(
                # No element leaves the page: the driver knows only those of the frame it is in.
                lambda what=(selector, says): self.script(
                    "const found = deep(arguments[0])"
                    ".find(e => e.textContent.trim() === arguments[1]);"
                    "if (found) found.click(); return Boolean(found)",
                    *what,
                ),
                f"no {selector} says {says!r}",
            )

    def point_at(self, selector: str, *, twice: bool = False) -> None:
        """Clicks, once or twice, where an element is drawn."""
        element = self.wait(lambda: self.elements(selector), f"there is no {selector}")[0]
        actions = ActionChains(self._driver)
        (actions.double_click(element) if twice else actions.click(element)).perform()

    def drawn(self, owner: str, tag: str) -> list[WebElement]:
        """The elements of a tag that a custom element has drawn inside itself."""
        found: list[WebElement] = self.script(
            "return deep(arguments[1]).filter("
            "e => (e.getRootNode().host || document.body).matches(arguments[0]))",
            owner,
            tag,
        )
        return found

    def fetch(self, path: str, body: Any = None, **query: str) -> Any:
        """Returns the JSON that TensorBoard gives this page; with a body, as a POST."""
        address = f"{path}?{urlencode(query)}" if query else path
        return self._driver.execute_async_script(
            "const [address, body, done] = arguments;"
            "const how = body ? {method: 'POST', body: JSON.stringify(body),"
            "  headers: {'Content-Type': 'application/json'}} : {};"
            "fetch(address, how).then(r => r.json()).then(done, e => done({error: String(e)}))",
            self._url + address,
            body,
        )

    def fetched(self) -> list[str]:
        """The addresses that the page itself has asked for."""
        found: list[str] = self.script(
            "return performance.getEntriesByType('resource').map(e => e.name)"
        )
        return found

    def picture(self, name: str) -> Path:
        """Takes a screenshot."""
        path = self._pictures / f"{name}.png"
        self._driver.save_screenshot(str(path))
        return path
