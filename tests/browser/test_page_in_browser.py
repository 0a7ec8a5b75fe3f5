"""The pages in a real Chromium: every recorded machine, by keyboard, in the dark, narrow, without scripts."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser import Browser, Tab
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from agent import advise
from agent.pages import report_page
from agent.report import Report
from agent.state import State
from agent.view import look
from probes.api import Snapshot
from probes.recording import load
from probes.scan import scan

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "tests" / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
SCREEN = 800  # pixels of a small laptop: what is seen without scrolling
SICK = {  # what a newcomer has to read first
    "sick-h100-rdma-off": ("pci.nic.no_rdma", "no RDMA device"),
    "sick-h100-dead-hca": ("topology.gpu_nic.down", "GPU3"),
    "sick-h100-gpu-lost": ("gpu.device.lost", "GPU5"),
    "sick-h100-memlock-64KiB": ("limits.memlock.low", "64"),
    "sick-h100-no-peermem": ("pci.peermem.missing", "nvidia_peermem"),
    "sick-h100-nvlink-missing": ("gpu.nvlink.missing", "GPU3"),
    "sick-h100-thermal": ("gpu.", "GPU"),
    "sick-l40s-x4": ("pci.link.width", "x4"),
    "r760xa-2xA40-bf3-memlock-8MiB": ("limits.memlock.low", "8"),
}


def clean(tab: Tab, address: str) -> None:
    """Nothing complained, and no request went anywhere else."""
    assert tab.complaints == []
    elsewhere = [url for url in tab.requests if urlsplit(url).scheme != "data" and not url.startswith(address)]
    assert elsewhere == []


def host_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}/"


def accessible(tab: Tab, axe: str) -> None:
    """axe-core finds nothing, best practices included; what it cannot decide (colours of drawings) is left to eyes."""
    if not tab.run("typeof axe !== 'undefined'"):
        tab.run(axe + "; 0")
    found = tab.run(
        "axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map("
        "v => v.id + ': ' + v.nodes.slice(0, 3).map(n => n.target + ' ' + n.html.slice(0, 120)).join(' | ')))"
    )
    assert found == []


def fault_is_first(tab: Tab, code: str, word: str) -> None:
    """Without a scroll or a click: the verdict, the fault, where it is, and what to do."""
    first = tab.text(".finding")
    assert code in first
    assert word in first
    assert tab.text(".verdict")
    assert tab.run("document.querySelector('.finding .remedy').getBoundingClientRect().bottom") < SCREEN


@pytest.mark.parametrize("name", NAMES)
def test_every_machine_has_a_clean_page(chromium: Browser, axe: str, machines: dict[str, str], name: str) -> None:
    """Node page and what-if page: no complaint, no request elsewhere, axe-core clean; a fault is read first."""
    with chromium.tab(height=SCREEN) as tab:
        tab.go(machines[name])
        assert tab.text("h1")
        if name in SICK:
            fault_is_first(tab, *SICK[name])
        accessible(tab, axe)
        tab.go(machines[name] + "what-if?model=Llama-3.1-8B&nodes=")
        assert "Llama-3.1-8B" in tab.text("#layouts")  # axe-core reads this page in the tests of the form and the dark
        clean(tab, machines[name])


@pytest.mark.parametrize("name", ["sick-h100-rdma-off", "r760xa-2xA40-bf3", "cpu-only-vm"])
def test_dark_pages_have_contrast_too(chromium: Browser, axe: str, machines: dict[str, str], name: str) -> None:
    """The dark colours hold the same contrast rules."""
    with chromium.tab(dark=True) as tab:
        for door in ("", "what-if?model=Llama-3.1-8B&machine=p5.48xlarge&nodes=2", "docs"):
            tab.go(machines[name] + door)
            assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 26)"
            accessible(tab, axe)
        clean(tab, machines[name])


@pytest.mark.parametrize("name", ["sick-h100-rdma-off", "hgx-h100-8xH100-8hca", "aws-p4d-8xA100-4efa"])
def test_narrow_screens_scroll_one_way_only(chromium: Browser, machines: dict[str, str], name: str) -> None:
    """Wide drawings and tables scroll inside themselves."""
    with chromium.tab(width=360, height=740) as tab:
        for door in ("", "what-if?model=Llama-3.1-8B&machine=p5.48xlarge&nodes=2", "docs"):
            tab.go(machines[name] + door)
            assert tab.run("document.scrollingElement.scrollWidth") <= 360, door


def test_the_what_if_form_by_keyboard(chromium: Browser, axe: str, machines: dict[str, str]) -> None:
    """Tab to the form, choose, press Enter: layouts side by side, each with both bars on shared scales."""
    address = machines["sick-h100-rdma-off"]
    with chromium.tab() as tab:
        tab.go(address)
        tab.run("document.querySelector('select[name=model]').value = 'Llama-3.1-70B'")
        tab.run("document.querySelector('select[name=method]').value = 'full'")
        tab.run("document.querySelector('select[name=machine]').value = 'p5.48xlarge'")
        tab.run("document.querySelector('input[name=nodes]').value = '4'")
        tab.run("document.querySelector('input[name=nodes]').focus()")
        tab.key("Enter", 13)
        tab.loaded()
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
        tab.go(address + "what-if?model=Llama-3.1-8B&nodes=none")
        assert "nodes=none: must be a whole number" in tab.text("[role=alert]")
        assert all("400" in complaint for complaint in tab.complaints)  # the browser logs the status, nothing else


def test_copy_gives_exactly_the_text(chromium: Browser, machines: dict[str, str]) -> None:
    """The button fills the clipboard, says so, and is absent where scripts are."""
    address = machines["r760xa-2xA40-bf3"]
    with chromium.tab() as tab:
        origin = host_of(address).rstrip("/")
        tab.ask(
            "Browser.grantPermissions", origin=origin, permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
        )
        tab.go(address)
        tab.ask("Page.bringToFront")
        tab.run("document.querySelector('button[data-copy=env]').click()")
        tab.until("document.getElementById('said').textContent === 'Copied.'")
        copied = tab.run("navigator.clipboard.readText()")
        assert copied == tab.run("document.getElementById('env').textContent")
        assert "export " in copied
        clean(tab, host_of(address))
    with chromium.tab(scripts=False) as tab:
        tab.go(address)
        tab.ask("Emulation.setScriptExecutionDisabled", value=False)
        assert tab.run("document.querySelector('button[data-copy=env]').hidden")


def test_without_scripts_everything_is_there(chromium: Browser, machines: dict[str, str]) -> None:
    """The same findings, drawing and form; only the comfort is missing."""
    with chromium.tab(scripts=False) as tab:
        tab.go(machines["sick-h100-rdma-off"])
        tab.ask("Emulation.setScriptExecutionDisabled", value=False)
        assert "no RDMA device" in tab.text("main")
        assert tab.run("document.querySelectorAll('svg.drawing').length") == 1
        assert tab.run("document.querySelector('form').action").endswith("/what-if")


def test_a_change_reaches_an_open_page(chromium: Browser, agent: Callable[..., tuple[str, State]]) -> None:
    """A node falls sick: the open page shows it without a reload, keeps what was opened, and says it aloud."""
    well, sick = (scan(load(FOLDER / f"{name}.json")) for name in ("hgx-h100-8xH100-8hca", "sick-h100-rdma-off"))
    snapshots = [well]
    address, state = agent(lambda: tuple(snapshots))
    with chromium.tab() as tab:
        tab.go(address)
        assert "pass" in tab.text(".verdict")
        tab.run("document.getElementById('passes').open = true")
        tab.run("window.sameDocument = true")
        snapshots[0] = sick
        state.refresh()
        tab.until("document.querySelector('.verdict').innerText.includes('FAIL')")
        assert tab.run("window.sameDocument")
        tab.until("document.getElementById('said').textContent.includes('fail')")
        assert tab.run("document.getElementById('passes').open")
        assert tab.run("document.title").startswith("fail")
        clean(tab, address)


def test_several_hosts_are_a_table_that_leads_to_each(
    chromium: Browser, axe: str, agent: Callable[..., tuple[str, State]]
) -> None:
    """Sick nodes first, each with its first finding, a link to its own page and back."""
    snapshots = tuple(scan(load(FOLDER / f"{name}.json")) for name in NAMES if not name.endswith("8MiB"))
    address, _ = agent(lambda: snapshots)
    with chromium.tab() as tab:
        tab.go(address)
        accessible(tab, axe)
        rows = tab.run("[...document.querySelectorAll('.nodes tbody tr')].map(r => r.innerText)")
        assert len(rows) == len(snapshots)
        words = ["FAIL" in row for row in rows]
        assert words == sorted(words, reverse=True)
        assert any("hgx-h100-sick-rdma" in row and "no RDMA device" in row for row in rows)
        tab.run("[...document.querySelectorAll('.nodes a')].find(a => a.innerText === 'hgx-h100-sick-rdma').click()")
        tab.loaded()
        assert tab.text("h1") == "hgx-h100-sick-rdma"
        assert "17 nodes" in tab.text("header") or "All" in tab.text("header")
        clean(tab, address)


def test_measurements_and_flights_are_shown(
    chromium: Browser, axe: str, agent: Callable[..., tuple[str, State]], tmp_path: Path
) -> None:
    """The last benchmark, and flights over two networks side by side with forecast against measurement."""
    (tmp_path / "flights").mkdir()
    for number, (transport, step) in enumerate([("NET/Socket/0", 3.1), ("NET/IB/0/GDRDMA", 1.0)]):
        record = {
            "status": "complete", "steps_done": 20, "started_at": f"2026-01-0{number + 1}T00:00:00Z",
            "model": {"name": "Llama-3.1-8B"}, "transports": [f"{transport}"],
            "layout": {"family": "FSDP", "effective": {"world_size": 2, "device": "cuda", "backend": "nccl"}},
            "measured": {"step_seconds": step, "tokens_per_second": 4000.0}, "loss": {"first": 2.0, "last": 1.0},
            "comparison": [{"quantity": "step_seconds", "measured": step,
                            "forecast": {"low": 0.8, "mid": 1.0, "high": 1.3}}],
        }  # fmt: skip
        (tmp_path / "flights" / f"{number}.json").write_text(json.dumps(record))
    snapshot = scan(load(FOLDER / "r760xa-2xA40-bf3.json"))
    address, _ = agent(lambda: (snapshot,), folder=tmp_path)
    with chromium.tab() as tab:
        tab.go(address)
        accessible(tab, axe)
        bars = tab.text(".runs")
        assert "NET/Socket" in bars
        assert "3.10 x" in bars
        figures = tab.run("[...document.querySelectorAll('td.wide svg.bar')].map(b => b.getAttribute('aria-label'))")
        assert any("inside it" in label for label in figures)
        assert any("outside it" in label for label in figures)
        clean(tab, address)


def test_the_report_is_one_file_for_a_ticket(chromium: Browser, axe: str, tmp_path: Path) -> None:
    """Opened from disk: nothing is fetched, no script is in it, ids are unique, axe-core is content."""
    snapshots = tuple(scan(load(FOLDER / f"{name}.json")) for name in ("sick-h100-rdma-off", "hgx-h100-8xH100-8hca"))
    view = look(snapshots)
    whole = Report(
        started_at_seconds=0.0, seconds=1.0, topoflight_version="0", snapshots=snapshots, topologies=view.topologies,
        checks=view.checks, verdict=view.verdict, notes=("the benchmark: no GPU here",),
        recommendation=advise.for_view(view, advise.Request(model="Llama-3.1-8B")),
    )  # fmt: skip
    path = tmp_path / "report.html"
    path.write_text(report_page(whole), encoding="utf-8")
    with chromium.tab() as tab:
        tab.go(path.as_uri())
        assert "no RDMA device" in tab.text(".finding")
        assert tab.run("document.scripts.length") == 0
        ids = tab.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
        assert len(ids) == len(set(ids))
        assert tab.run("document.querySelectorAll('a[href^=\"./\"]').length") == 0
        accessible(tab, axe)
        clean(tab, path.as_uri())


def test_a_failed_scan_is_said_on_the_page(chromium: Browser, agent: Callable[..., tuple[str, State]]) -> None:
    """The older view stays, and says that it is one."""
    left = [(scan(load(FOLDER / "cpu-only-vm.json")),)]

    def look_once() -> tuple[Snapshot, ...]:
        if not left:
            raise OSError("driver gone")
        return left.pop()

    address, state = agent(look_once)
    with chromium.tab() as tab:
        end = time.monotonic() + 30  # the agent scans again when it starts
        while state.error is None and time.monotonic() < end:
            time.sleep(0.05)
        tab.go(address)
        assert "driver gone" in tab.text("[role=alert]")
        assert tab.text("h1") == "vm"


def test_doors_are_listed_from_the_agent_itself(chromium: Browser, axe: str, machines: dict[str, str]) -> None:
    """No page of the agent loads anything from elsewhere, its own API list included."""
    address = machines["cpu-only-vm"]
    with chromium.tab() as tab:
        tab.go(address + "docs")
        assert "/recommendations" in tab.text("main")
        accessible(tab, axe)
        clean(tab, address)


def test_pictures(chromium: Browser, machines: dict[str, str], tmp_path: Path) -> None:
    """The README's pictures are the page and the terminal themselves; TOPOFLIGHT_UPDATE_PICTURES=1 keeps them."""
    folder = ROOT / "docs" / "pictures" if os.environ.get("TOPOFLIGHT_UPDATE_PICTURES") == "1" else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    with chromium.tab(width=1160, height=1000) as tab:
        tab.go(machines["sick-h100-rdma-off"])
        height = tab.run("document.querySelector('svg.drawing').getBoundingClientRect().bottom + 50")
        keep(folder / "page.png", tab.picture(int(height), 1160))
    terminal = tmp_path / "terminal.html"
    terminal.write_text(terminal_page("scan", "--host", "tests/machines/sick-h100-rdma-off.json"), encoding="utf-8")
    with chromium.tab(width=820, height=300) as tab:
        tab.go(terminal.as_uri())
        height = tab.run("document.querySelector('pre').getBoundingClientRect().bottom + 16")
        keep(folder / "terminal.png", tab.picture(int(height), 820))


def keep(path: Path, picture: bytes) -> None:
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 300_000
    path.write_bytes(picture)


def terminal_page(*words: str) -> str:
    """What the command prints on a terminal of 80 columns, as a page."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "agent.cli", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "\x1b[" in done.stdout, done.stderr
    out = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    out.print(f"$ topoflight {' '.join(words)}", style="bold")
    out.print(Text.from_ansi(done.stdout))
    return out.export_html(theme=SVG_EXPORT_THEME, inline_styles=True)
