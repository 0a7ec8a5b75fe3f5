"""The reference pages have one full entry for every finding code, log problem, diagnosis and alert."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from alerts import ALERTS
from click.testing import CliRunner
from rigs.tables import each_row

from agent.checks.codes import ALL_CODES
from agent.checks.explain import PAGES, sections
from agent.checks.history import AT_ONCE
from agent.cli.explain import explain
from collectives.nccl_log.codes import CODES as LOG_CODES
from planner.lint.values import CODES as ENV_CODES
from planner.lint.values import texts

ROOT = Path(__file__).parent.parent.parent

PARTS = ["Meaning", "Cause", "Confirm", "Remedy", "Severity"]
GATE = {code for code in ALL_CODES if not code.startswith("env.")}


def headings(name: str) -> list[str]:
    return re.findall(
        r"^### `([^`]+)`$", (ROOT / f"docs/reference/{name}.md").read_text(encoding="utf-8"), re.MULTILINE
    )


def diagnoses() -> set[str]:
    """Codes that `why` gives its causes: literals of the sources, and of the tests where the code builds them."""
    places = [*(ROOT / "planner/why").glob("*.py"), *(ROOT / "agent/why").glob("*.py"), ROOT / "tests/why/test_why.py"]
    text = "".join(place.read_text(encoding="utf-8") for place in places)
    found = set(re.findall(r"\"((?:rank|ranks|call|link|all|timeout|step|model|rendezvous)\.[a-z]+)\"", text))
    found |= set(tomllib.loads((ROOT / "planner/why/why.toml").read_text(encoding="utf-8"))["code"].values())
    return found | set(re.findall(r"code=\"([a-z]+)\"", text))


def test_every_code_has_one_entry_on_its_page() -> None:
    """No code without an entry, no entry without a code, none twice."""
    pages = {name: headings(name) for name in PAGES}
    assert sorted(pages["findings"]) == sorted(GATE)
    assert sorted(pages["settings"]) == sorted(ENV_CODES)
    assert sorted(pages["log-problems"]) == sorted(LOG_CODES)
    assert pages["alerts"] == [alert.name for alert in ALERTS]
    assert diagnoses() <= set(pages["diagnoses"]), diagnoses() - set(pages["diagnoses"])
    assert len(sections()) == sum(map(len, pages.values()))


@each_row("name", sorted(sections()))
def test_an_entry_is_whole(name: str) -> None:
    """Each point once, in order, in sentences; the severities are those of the code."""
    points = re.findall(r"^- \*\*(\w+):\*\* (\S.*)$", sections()[name], flags=re.MULTILINE)
    assert [point for point, _ in points] == PARTS + (["Once"] if name in AT_ONCE else [])
    assert all(text.endswith(".") for _, text in points), points
    told = re.findall(r"[a-z]+", dict(points)["Severity"].partition(".")[0])
    if name in LOG_CODES:
        assert told == [LOG_CODES[name].severity]
    elif name in ENV_CODES:
        assert {text.status for key, text in texts().items() if key.partition("/")[0] == name} - {None} <= set(told)


def test_named_codes_exist() -> None:
    """An entry that sends the reader to another code sends it to one that is there."""
    firsts = "|".join(sorted({code.split(".")[0] for code in GATE}))
    text = re.sub(r"`[^`]*`", "", "".join(sections().values()))  # file names such as run.json stand in code
    named = set(re.findall(rf"(?<![\w.])(?:{firsts})(?:\.[a-z_0-9]+)+\b", text))
    assert named - sections().keys() == set()
    assert "limits.memlock.low" in named


def test_explain_prints_the_entry() -> None:
    """`topoflight explain CODE` answers for every code and lists all of them; a wrong one is helped with."""
    for code in sections():
        result = CliRunner().invoke(explain, [code])
        assert result.exit_code == 0 and result.output.startswith(f"{code}\n"), code
        assert all(f"{part}:" in result.output for part in PARTS), code
        assert max(map(len, result.output.splitlines())) <= 80, code
    listed = CliRunner().invoke(explain, ["--list"])
    assert [line.split()[0] for line in listed.output.splitlines()] == list(sections())
    wrong = CliRunner().invoke(explain, ["rdma.port.dwn"])
    assert wrong.exit_code == 2 and "rdma.port.down" in wrong.output
    assert CliRunner().invoke(explain, []).exit_code == CliRunner().invoke(explain, ["--list", "x"]).exit_code == 2
