"""Text of records and recordings on its way to a terminal, JUnit and GitHub's commands: it steers nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.command import topoflight
from rigs.recorded import path_of
from rigs.tables import each_row

from agent.base.output import console
from contracts.plain import printable

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\x00\r::error::\u202egnp.exe\u2066 a\x7fb"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def recording(tmp_path: Path) -> str:
    """A sick machine whose names and words are hostile: hostname, product, board, driver and the kernel's log."""
    content: dict[str, Any] = json.loads(path_of("sick-h100-gpu-lost").read_text(encoding="utf-8"))
    answers = content["answers"]
    content["hostname"] = answers["identity"][""]["hostname"] = f"node{HOSTILE}"
    for path in answers["read_text"]:
        if path.endswith(("/product_name", "/board_id", "/fw_ver")):
            answers["read_text"][path] += HOSTILE
    answers["nvml"]["nvmlSystemGetDriverVersion"][""] = f"550{HOSTILE}"
    answers["nvml"]["nvmlDeviceGetName"]["gpu0"] = f"NVIDIA H100 80GB HBM3{HOSTILE}"  # so that models are mixed
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


@each_row(
    "words",
    [
        ("scan", "--all"), ("topo",), ("diff", path_of()), ("preflight", "-o", "table"), ("preflight", "-o", "junit"),
        ("preflight", "-o", "github"),
    ],
)  # fmt: skip
def test_no_verb_passes_what_steers(words: tuple[str, ...], recording: str, tmp_path: Path) -> None:
    verb, *options = words
    place = [recording] if verb == "diff" else ["--host", recording]
    made = topoflight(verb, *options, *place, TOPOFLIGHT_STATE=str(tmp_path))
    assert "owned" in made.output, made.output
    assert not STEERS.search(made.output), repr(STEERS.search(made.output))
    assert not any(line.startswith("::error::") for line in made.output.splitlines())
    if "junit" in words:
        ElementTree.fromstring(made.stdout)  # noqa: S314 - our own


def test_colours_of_our_own_stay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Markup becomes a colour, an escape sequence of the text does not."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    out = console()
    out._color_system = 1
    out.print("[red]bad[/red] \x1b[2J")
    shown = capsys.readouterr().out
    assert "\x1b[31m" in shown
    assert "\x1b[2J" not in shown


@given(st.text())
def test_what_is_printable_stays_and_is_plain(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert not STEERS.search(shown)
    assert all(new in (old, "?") for old, new in zip(text, shown, strict=True))
    shown.encode()
