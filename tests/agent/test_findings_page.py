"""docs/findings.md says of every finding code what it means, where to see it and what mends it."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner
from rigs.tables import each_row

from agent.checks.codes import ALL_CODES
from agent.checks.explain import sections
from agent.checks.history import AT_ONCE
from agent.cli.explain import explain
from collectives.nccl_log.codes import CODES as LOG_CODES
from planner.lint.tables import CODES as ENV_CODES

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "findings.md"
PARTS = ("Means", "Severity", "See", "Mend")
EVERY_CODE = {*ALL_CODES, *ENV_CODES, *LOG_CODES}


def headings() -> list[str]:
    lines = re.findall(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [code for line in lines for code in re.findall(r"`([^`]+)`", line)]


def test_page_and_code_name_the_same_findings() -> None:
    """No code without a section, no section without a code, none twice."""
    found = headings()
    assert set(found) == EVERY_CODE
    assert len(found) == len(set(found))


@each_row("code", sorted(EVERY_CODE))
def test_section_has_its_parts(code: str) -> None:
    """Each part is there once, in order, and says something; a code of the gate has its severities."""
    text = sections()[code]
    gate = code in ALL_CODES and not code.startswith("env.")  # of settings docs/nccl-env.md tells them
    wanted = [part for part in PARTS if gate or part != "Severity"]
    wanted += ["Once"] if code in AT_ONCE else []
    assert re.findall(r"^- \*\*(\w+):\*\* \S", text, flags=re.MULTILINE) == wanted


def test_section_stands_in_the_chapter_of_its_probe() -> None:
    """A reader finds a code, or the first of its section, by its first word; problems of a log have one chapter."""
    chapter = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            chapter = line.removeprefix("## ")
        elif line.startswith("### "):
            first, *others = re.findall(r"`([^`]+)`", line)
            own = "every probe" if first.endswith(".probe.failed") else first.split(".")[0] if "." in first else "log"
            assert chapter == own, (first, others)


def test_named_codes_exist() -> None:
    """A section that sends the reader to another code sends it to one that is there."""
    text = PAGE.read_text(encoding="utf-8")
    firsts = "|".join(sorted({code.split(".")[0] for code in EVERY_CODE if "." in code}))
    prose = re.sub(r"`[^`]*`", "", text)  # file names such as run.json stand in code
    named = set(re.findall(rf"\b(?:{firsts})\.[a-z_]+\.?[a-z_0-9]+\b", prose))
    assert named - EVERY_CODE == set()
    assert "limits.memlock.low" in named


def test_explain_prints_the_section() -> None:
    """`topoflight explain CODE` answers for every code, and helps with a wrong one."""
    alerts = re.findall(r"^## Alert Name: (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), flags=re.MULTILINE)
    assert alerts
    for code in sorted({*EVERY_CODE, *alerts}):
        result = CliRunner().invoke(explain, [code])
        assert result.exit_code == 0 and result.output.startswith(f"{code}\n"), code
        assert all(word in result.output for word in ("Means:", "See:", "Mend:")), code
        assert "\n## " not in result.output, f"{code}: the next chapter is printed too"
        assert max(map(len, result.output.splitlines())) <= 80, code
    wrong = CliRunner().invoke(explain, ["rdma.port.dwn"])
    assert wrong.exit_code == 2 and "rdma.port.down" in wrong.output
