"""The pages in a real Chromium: every recorded machine, by keyboard, in the dark, narrow, without scripts."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text
from rigs.agents import agent as agent_of
from rigs.faults import FAULTS, Fault
from rigs.fleet import resources
from rigs.packages import apt_installed, npm_installed
from rigs.recorded import NAMES, snapshot
from rigs.serving import serving
from rigs.tables import ROOT, each_row
from starlette.applications import Starlette
from starlette.routing import Mount

from agent.advice.advise import advise_view
from agent.advice.request import Request
from agent.base import units
from agent.cluster.nodes import Fleet
from agent.http import pages
from agent.http.server import create
from agent.http.state import State
from agent.jobs.preflight import Report
from agent.pages import render_report
from collectives.bench.results import BenchResult, read_as
from collectives.nccl_log.evidence import read_files
from contracts import plain

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


pytestmark = pytest.mark.browser

MEASURED = Path(__file__).parent / "measured"  # real results of our own tools; nccl.log is written by hand
SCREEN = 800  # pixels of a small laptop: what is seen without scrolling
SICK = {fault.machine: fault for fault in FAULTS}  # what a newcomer has to read first
# TOPOFLIGHT_PAIRS=all: every machine; what each page says is tested without a browser on all of them (tests/agent)
SHOWN = NAMES if os.environ.get("TOPOFLIGHT_PAIRS") == "all" else (
    "hgx-h100-8xH100-8hca", "cpu-only-vm", "gb200-nvl72-tray", "sick-h100-gpu-lost", "sick-h100-rdma-off"
)  # fmt: skip


def clean(tab: Tab, address: str) -> None:
    """Nothing complained, and no request went anywhere else."""
    assert tab.complaints == []
    elsewhere = [url for url in tab.requests if urlsplit(url).scheme != "data" and not url.startswith(address)]
    assert elsewhere == []


def accessible(tab: Tab, axe: str) -> None:
    """axe-core finds nothing, best practices included; what it cannot decide (colours of drawings) is left to eyes."""
    if not tab.run("typeof axe !== 'undefined'"):
        tab.run(axe + "; 0")
    found = tab.run(
        "axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map("
        "v => v.id + ': ' + v.nodes.slice(0, 3).map(n => n.target + ' ' + n.html.slice(0, 120)).join(' | ')))"
    )
    assert found == []


def fault_is_first(tab: Tab, fault: Fault) -> None:
    """Without a scroll or a click: the verdict, the fault, where it is, and what to do; or what is as bad, then it."""
    assert all(tab.text(f".finding:nth-child({n + 1}) .chip") == "✗ FAIL" for n in range(fault.place))
    finding = f".finding:nth-child({fault.place + 1})"
    assert fault.says in tab.text(finding)
    assert fault.code in tab.text(finding)
    assert fault.fix in tab.text(f"{finding} .remedy")
    assert ("FAIL" if fault.severity == "fail" else "warn") in tab.text(".verdict")
    assert tab.run("document.title").startswith(fault.severity)
    assert tab.run("document.querySelector('.finding .remedy').getBoundingClientRect().bottom") < SCREEN


@each_row("name", SHOWN)
def test_every_machine_has_a_clean_page(chromium: Tabs, axe: str, machines: dict[str, str], name: str) -> None:
    """No complaint, no request elsewhere; a fault is read first. Of those without one also axe-core and what-if."""
    address = machines[name]
    with chromium.tab(height=SCREEN) as tab:
        tab.open_page(address)
        assert tab.text("h1")
        if name in SICK:
            fault_is_first(tab, SICK[name])
        else:
            accessible(tab, axe)
            tab.open_page(address + "what-if?model=Llama-3.1-8B&nodes=")
            assert "Llama-3.1-8B" in tab.text("#layouts")  # axe-core reads it in the tests of the form and the dark
        clean(tab, address)


def test_dark_pages_have_contrast_too(chromium: Tabs, axe: str, machines: dict[str, str]) -> None:
    """The dark colours hold the same contrast rules."""
    with chromium.tab(dark=True) as tab:
        for endpoint in ("", "what-if?model=Llama-3.1-8B&machine=p5.48xlarge&nodes=2"):
            tab.open_page(machines["sick-h100-rdma-off"] + endpoint)
            assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 26)"
            accessible(tab, axe)
        clean(tab, machines["sick-h100-rdma-off"])


QUESTION = "what-if?model=Llama-3.1-8B&method=full&machine=p5.48xlarge&nodes=2"
WIDER = """w => [...document.querySelectorAll('main *, header *')].filter(e => !e.closest('.scroll, .skip')
  && e.getBoundingClientRect().right > w + 1).slice(0, 3).map(e => e.tagName + '.' + e.className)"""


def every_page(
    machines: dict[str, str], agent: Callable[..., tuple[str, State]], console: Callable[[int], str], folder: Path
) -> dict[str, str]:
    """The address of every page with healthy, failing, empty and large data, each table and figure among them."""
    names = ("sick-h100-rdma-off", "aws-p4d-8xA100-4efa", "cpu-only-vm")
    alike = ("cluster", QUESTION, f"{QUESTION}&steps=2000&price=98.32&network=100G",
             "what-if?model=Llama-3.1-70B&method=full&machine=4xl40s",
             "what-if?model=Llama-3.1-8B&nodes=0")  # fmt: skip
    asked = [*((name, path) for name in names for path in ("", "what-if")), *((names[0], path) for path in alike)]
    pages_of = {f"{name} /{path}": machines[name] + path for name, path in asked}
    shutil.copytree(MEASURED / "runs", folder / "runs")
    shutil.copy(MEASURED / "bench.json", folder)
    address, state = agent(lambda: (snapshot("r760xa-2xA40-bf3"),), folder=folder)
    view = state.refresh()
    held = Fleet()
    held.replace(resources(64, sick=True))
    reports = {
        "report": Report(
            snapshots=view.snapshots, checks=view.checks, topologies=view.topologies, verdict=view.verdict,
            run=view.runs[0], bench=view.bench,
            recommendation=advise_view(view, Request.of(model="Llama-3.1-8B")),
        ),
        "report of nodes": Report(checks=view.checks, verdict=view.verdict, nodes=tuple(held.records())),
    }  # fmt: skip
    files = {name: render_report(report) for name, report in reports.items()} | {
        "empty cluster": pages.render_fleet_page(Fleet(), source="kubernetes", list_error=None),
        "published": pages.render_published_page(held, held.records()[20], source="kubernetes"),
    }
    for name, text in files.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
        pages_of[name] = (folder / f"{name}.html").as_uri()
    return pages_of | {"runs": address, "fleet": console(64)}


@pytest.mark.timeout(1800)
def test_no_page_is_wider_than_a_phone(chromium, machines, agent, console, tmp_path):
    """Wide drawings and tables scroll inside themselves, or become narrow."""
    wide = []
    with chromium.tab(width=390, height=740) as tab:
        for name, address in every_page(machines, agent, console, tmp_path).items():
            tab.open_page(address).until("document.fonts.status === 'loaded'")
            if tab.run("document.scrollingElement.scrollWidth") > 390:
                wide.append((name, tab.page.evaluate(WIDER, 390)))
    assert not wide, wide


def test_the_what_if_form_by_keyboard(chromium: Tabs, axe: str, machines: dict[str, str]) -> None:
    """Tab to the form, choose, press Enter: layouts side by side, each with both bars on shared scales."""
    address = machines["sick-h100-rdma-off"]
    with chromium.tab() as tab:
        tab.open_page(address + "what-if")
        for name, value in (("model", "Llama-3.1-70B"), ("method", "full"), ("machine", "p5.48xlarge"), ("nodes", "4")):
            tab.run(f"document.querySelector('select[name={name}], input[name={name}]').value = '{value}'")
        tab.run("document.querySelector('input[name=nodes]').focus()")
        tab.follow(lambda: tab.page.keyboard.press("Enter"))
        assert "machine=p5.48xlarge" in tab.run("location.search")
        assert "Llama-3.1-70B" in tab.text("#layouts")
        assert tab.run("document.querySelectorAll('.layout').length") >= 2
        assert tab.run(
            "[...document.querySelectorAll('.layout')].every(l => l.querySelectorAll('svg.bar').length === 2)"
        )
        assert "32 ranks" in tab.text(".layout.chosen")
        labels = tab.run("[...document.querySelectorAll('.layout svg.bar')].map(b => b.getAttribute('aria-label'))")
        assert all("%" in label for label in labels)
        accessible(tab, axe)
        tab.open_page(address + "what-if?model=Llama-3.1-8B&nodes=none")
        assert "nodes=none: must be a valid integer" in tab.text("[role=alert]")
        # the status, and that the field of a number holds none
        assert all("400" in one or "cannot be parsed" in one for one in tab.complaints), tab.complaints


def test_copy_gives_exactly_the_text(chromium: Tabs, machines: dict[str, str]) -> None:
    """The button fills the clipboard, says so, and is absent where scripts are."""
    address = machines["r760xa-2xA40-bf3"]
    with chromium.tab(permissions=("clipboard-read", "clipboard-write")) as tab:
        tab.open_page(address)
        for block, begins in (("env", "export "), ("yaml", "- name: ")):
            tab.run("document.getElementById('announcement').textContent = ''")
            tab.run(f"document.querySelector('button[data-copy={block}]').click()")
            tab.until("document.getElementById('announcement').textContent !== ''")
            assert tab.text("#announcement") == "Copied."
            copied = tab.run("navigator.clipboard.readText()")
            assert copied == tab.run(f"document.getElementById('{block}').textContent")
            assert begins in copied
        clean(tab, address.removesuffix("r760xa-2xA40-bf3/"))
    with chromium.tab(scripts=False) as tab:
        tab.open_page(address)
        assert tab.run("getComputedStyle(document.querySelector('button[data-copy=env]')).display") == "none"
        assert tab.run("document.querySelectorAll('svg.drawing').length") == 1, "the rest is there without scripts"
        assert tab.run("document.querySelector('nav a[href=what-if]') !== null")


# Every half minute an open page asks for itself anew; here three times a second.
HURRIED = "const slow = window.setInterval; window.setInterval = (f, ms) => slow(f, ms / 100)"


def test_a_change_reaches_an_open_page(chromium: Tabs, agent: Callable[..., tuple[str, State]]) -> None:
    """A node falls sick: its page and the cluster's show it without a reload, and say it; what was opened stays so."""
    well, sick = (snapshot(name) for name in ("hgx-h100-8xH100-8hca", "sick-h100-rdma-off"))
    served = [well]
    address, state = agent(lambda: tuple(served))
    for path in ("", "cluster"):
        served[0] = well
        state.refresh()
        with chromium.tab() as tab:
            tab.page.add_init_script(HURRIED)
            tab.open_page(address + path)
            assert "pass" in tab.text(".verdict"), path
            tab.run("window.sameDocument = true")
            opened = "document.querySelector('#passes')"
            tab.run(f"if ({opened}) {opened}.open = true")
            served[0] = sick
            state.refresh()
            tab.until("document.querySelector('.verdict').innerText.includes('FAIL')")
            assert tab.run("window.sameDocument"), path
            tab.until("document.getElementById('announcement').textContent.includes('fail')")
            assert path or tab.run(f"{opened}.open")
            assert tab.run("document.title").startswith("fail"), path
            clean(tab, address)


def follow(tab: Tab, name: str) -> None:
    """Click the link of a node."""
    tab.follow(tab.page.locator(".nodes").get_by_role("link", name=name, exact=True).first.click)


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The console of so many nodes, some of them sick, as a file: no server's time is in what the browser takes."""
    folder = tmp_path_factory.mktemp("console")

    @cache
    def made(nodes: int) -> str:
        held = Fleet()
        held.replace(resources(nodes, sick=True))
        file = folder / f"{nodes}.html"
        file.write_text(pages.render_fleet_page(held, source="kubernetes", list_error=None), encoding="utf-8")
        return file.as_uri()

    return made


SHIFT = """new Promise(done => { let sum = 0;
  const add = list => list.getEntries().forEach(one => sum += one.value);
  new PerformanceObserver(add).observe({type: 'layout-shift', buffered: true}); setTimeout(() => done(sum), 500); })"""
DRAWN = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def drawn(tab: Tab, address: str) -> float:
    """The milliseconds until a page is loaded."""
    tab.open_page(address)
    return float(tab.run(DRAWN))


@pytest.mark.parametrize("width", [1440, 390])
def test_a_console_of_5000_nodes_is_drawn_at_once_and_stays_in_its_place(chromium, axe, console, width):
    """Within twenty times what one node takes (measured: 2 to 5 times), with no visible shift, within the window."""
    with chromium.tab(width=width, height=900) as tab:
        for _ in range(4):  # other work may have had the cores
            one, many = (drawn(tab, console(nodes)) for nodes in (1, 5000))
            if many < 20 * one:
                break
        # A busy host draws a page while it comes, and a line that came in part grows by some pixels. Below 0.1 a page
        # counts as stable (https://web.dev/articles/cls).
        slowed = tab.page.context.new_cdp_session(tab.page)
        slowed.send("Emulation.setCPUThrottlingRate", {"rate": 4})
        tab.open_page(console(5000))
        assert tab.run(SHIFT) < 0.1
        slowed.send("Emulation.setCPUThrottlingRate", {"rate": 1})
        assert "5000 nodes" in tab.text("h1")
        assert tab.run("document.scrollingElement.scrollWidth") <= width
        search = "document.querySelector('.ask input')"
        assert tab.run(f"{search}.getBoundingClientRect().width") > 0, "a phone can ask whatever a screen can"
        tab.open_page(console(64))  # axe-core takes ten seconds for 5,000 nodes, of which each is drawn as these are
        accessible(tab, axe)
    print(f"load: {one:.0f} ms with one node, {many:.0f} ms with 5,000")
    assert many < 20 * one


# Two hosts without GPUDirect RDMA, in the format of NCCL 2.27.
NCCL_LOG = MEASURED / "nccl.log"


def test_a_measured_run_is_shown_with_what_proves_it(chromium, axe, agent, tmp_path):
    """A benchmark that was really run, with NCCL's log: its fault is the first finding, with the lines that prove it.

    The run names its own hosts, as a job of two pods does; the page of the node shows it all the same.
    """
    result = read_as(json.loads((MEASURED / "bench.json").read_text()), BenchResult)
    result = replace(result, evidence=read_files([NCCL_LOG]))
    (tmp_path / "bench.json").write_text(json.dumps(plain.write(result)))
    address, _ = agent(lambda: (snapshot("r760xa-2xA40-bf3"),), folder=tmp_path)
    with chromium.tab(height=SCREEN) as tab:
        tab.open_page(address)
        first = tab.text(".finding")
        assert "GPUDirect RDMA is off: send 0/4, receive 0/4 channels" in first
        assert "[send] via NET/IB/0" in first
        assert "nvidia_peermem" in tab.text(".finding .remedy")
        shown = tab.text("section[aria-labelledby=measurements]")
        best = max(m.busbw_bytes_per_second for m in result.measurements if m.op == "all_gather")
        assert units.rate(best) in shown
        assert shown.count("yes") == len(result.measurements)
        assert "GPUDirect RDMA: off (send 0/4, receive 0/4)" in shown
        assert "GPU Direct RDMA Disabled for HCA 0" in shown
        accessible(tab, axe)
        clean(tab, address)


@pytest.mark.real
def test_runs_are_shown_with_their_network_and_their_forecast(chromium, agent, tmp_path):
    """Three real runs of one fine-tune over three networks; as today's runs do, their records name the one observed."""
    (tmp_path / "runs").mkdir()
    for path in (MEASURED / "runs").iterdir():
        record = json.loads(path.read_text())
        record["transports"] = [f"gloo: TCP over {record['plan']['environment']['GLOO_SOCKET_IFNAME']} (10.0.0.1)"]
        (tmp_path / "runs" / path.name).write_text(json.dumps(record))
    address, state = agent(lambda: (snapshot("r760xa-2xA40-bf3"),), folder=tmp_path)
    state.refresh()
    with chromium.tab() as tab:
        tab.open_page(address)
        shown = tab.text("section[aria-labelledby=runs]")
        assert all(f"gloo: TCP over {name} (10.0.0.1)" in shown for name in ("eth0", "net1", "lo"))
        figures = tab.run("[...document.querySelectorAll('td.wide svg.bar')].map(b => b.getAttribute('aria-label'))")
        assert any("inside it" in label for label in figures)


def test_pictures(chromium: Tabs, machines: dict[str, str], console: Callable[[int], str], tmp_path: Path) -> None:
    """The README's pictures are the page and the terminal themselves; TOPOFLIGHT_UPDATE_PICTURES=1 keeps them."""
    folder = ROOT / "docs" / "pictures" if os.environ.get("TOPOFLIGHT_UPDATE_PICTURES") == "1" else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    with chromium.tab(width=1440, height=900) as tab:
        tab.open_page(machines["sick-h100-rdma-off"])
        save_picture(folder / "page.png", tab, tab.picture(900, 1440))
        tab.open_page(console(64))
        save_picture(folder / "fleet.png", tab, tab.picture(900, 1440))
    with chromium.tab(width=1160, height=1000) as tab:
        tab.open_page(machines["sick-h100-rdma-off"] + "what-if?model=Llama-3.1-70B&machine=p5.48xlarge&nodes=2")
        height = tab.run("document.querySelector('.keys').getBoundingClientRect().bottom + 20")
        save_picture(folder / "what-if.png", tab, tab.picture(int(height), 1160))
    terminal = tmp_path / "terminal.html"
    terminal.write_text(terminal_page("scan", "--host", "tests/machines/sick-h100-rdma-off.json"), encoding="utf-8")
    with chromium.tab(width=820, height=300) as tab:
        tab.open_page(terminal.as_uri())
        height = tab.run("document.querySelector('pre').getBoundingClientRect().bottom + 16")
        save_picture(folder / "terminal.png", tab, tab.picture(int(height), 820))


def save_picture(path: Path, tab: Tab, picture: bytes) -> None:
    assert tab.complaints == [], "a page that does not answer is no picture"
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 300_000
    path.write_bytes(picture)


def terminal_page(*words: str) -> str:
    """What the command prints on a terminal of 80 columns, as a page."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "agent.cli", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "\x1b[" in done.stdout, done.stderr
    out = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    out.print(f"$ topoflight {' '.join(words)}", style="bold")
    out.print(Text.from_ansi(done.stdout))
    return out.export_html(theme=SVG_EXPORT_THEME, inline_styles=True)
