"""A tab of a real Chromium, through Playwright: what these tests ask of a page, and what the page complained of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, ConsoleMessage, Page

FLAGS = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync", "--disable-dev-shm-usage", "--force-color-profile=srgb",
)  # fmt: skip
ANSWER_SECONDS = 400  # a busy machine is slow, a hanging browser is not waited for


class Tab:
    """One page: goes, asks, types, and remembers every request and every complaint."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(1000 * ANSWER_SECONDS)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._console)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(message.text)

    def open_page(self, url: str) -> Tab:
        """Open an address and wait until it is loaded."""
        self.page.goto(url)
        return self

    def run(self, script: str):
        """The value of an expression, promises awaited."""
        return self.page.evaluate(script)

    def text(self, selector: str = "body") -> str:
        """What a person reads in the first element of that kind."""
        return self.page.locator(selector).first.inner_text()

    def until(self, script: str) -> None:
        """Wait until an expression is true; asked from outside, as the page's policy forbids what waits inside it."""
        end = time.monotonic() + ANSWER_SECONDS
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {script}")
            self.page.wait_for_timeout(100)

    def follow(self, act: Callable[[], object]) -> None:
        """Do what leads to another page, and wait for that."""
        with self.page.expect_navigation():
            act()

    def picture(self, height: int, width: int = 1200) -> bytes:
        """The top of the page as a PNG."""
        return self.page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height})


class Tabs:
    """Opens tabs, each with its own profile."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    @contextmanager
    def tab(
        self, *, width: int = 1200, height: int = 900, dark: bool = False, scripts: bool = True,
        permissions: tuple[str, ...] = (),
    ) -> Iterator[Tab]:  # fmt: skip
        """A new tab, closed at the end."""
        context = self._browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light",
            java_script_enabled=scripts, permissions=list(permissions),
        )  # fmt: skip
        try:
            yield Tab(context.new_page())
        finally:
            context.close()
