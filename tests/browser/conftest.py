"""Chromium, the accessibility rules and running agents for the tests in a real browser."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from browser import FLAGS, Tabs
from playwright.sync_api import sync_playwright
from rigs.agents import agent as agent_of
from rigs.packages import apt_installed, npm_installed
from rigs.recorded import NAMES
from rigs.serving import serving
from starlette.applications import Starlette
from starlette.routing import Mount

from agent.http.server import create
from agent.http.state import State

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def chromium() -> Iterator[Tabs]:
    """Debian's Chromium, installed where it is missing and this is root.

    For one module, because the synchronous playwright keeps an event loop running in this thread while it is open, in
    which a test of another module could not run its own.
    """
    program = apt_installed("chromium", "chromium", "fonts-dejavu-core")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS), chromium_sandbox=False)
        yield Tabs(browser)
        browser.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core as package-lock.json pins it."""
    script = npm_installed(HERE, "browser") / "axe-core" / "axe.min.js"
    return script.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def machines() -> Iterator[dict[str, str]]:
    """The address of an agent on every recording, all behind one port: pages work under a path too."""
    mounts = [Mount(f"/{name}", agent_of(name).app) for name in NAMES]
    with serving(Starlette(routes=mounts)) as port:
        yield {name: f"http://127.0.0.1:{port}/{name}/" for name in NAMES}


@pytest.fixture
def agent() -> Iterator[Callable[..., tuple[str, State]]]:
    """Start an agent: `agent(scan, folder=...)` gives its address and its state."""
    with ExitStack() as running:

        def start(look: Callable, *, folder: Path | None = None) -> tuple[str, State]:
            state = State(look, interval_seconds=3600, folder=folder)
            state.refresh()
            app = create(state)
            return f"http://127.0.0.1:{running.enter_context(serving(app))}/", state

        yield start
