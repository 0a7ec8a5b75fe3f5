"""What NCCL does with a name and the text of a value, without any machine."""

import re
from pathlib import Path

import yaml
from rigs.tables import each_row, rows_of

from contracts.finding import Finding
from planner.lint.environment import lint
from planner.lint.findings import CODES
from planner.lint.script import NamedEnvironment
from planner.lint.values import strtoll

rows = rows_of(__file__, "lint_values.yaml")
SETTINGS = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
ENTRY = re.compile(r"^### `(.+)`$(?s:.*?)^- \*\*Severity:\*\* (.*?)\.", re.MULTILINE)
SEVERITIES = dict(ENTRY.findall(SETTINGS.read_text(encoding="utf-8")))


def found(
    environment: dict[str, str], version: tuple[int, ...] | None, source: str = "", nodes: int | None = None
) -> list[Finding]:
    """All findings, each with a code that is announced, a severity that its entry has, evidence and a remedy."""
    named = NamedEnvironment(environment=environment, source=source)
    findings = lint(named, nccl_version=version, nodes=nodes)
    for finding in findings:
        assert finding.code in CODES, finding
        assert finding.status.value in SEVERITIES[finding.code].split(" or "), finding
        assert finding.evidence[0].startswith(f"{finding.subject}="), finding
        assert finding.remedy.endswith(".") and finding.message.endswith("."), finding
    return list(findings)


def codes(name: str, value: str) -> list[str]:
    """The codes of one variable for an unknown release."""
    return [finding.code for finding in found({name: value}, None)]


@each_row(("text", "value", "whole"), rows("strtoll"))
def test_strtoll_as_the_c_library(text: str, value: int, whole: bool) -> None:
    """Base 0: decimal, 0x hexadecimal, leading 0 octal; the rest is dropped."""
    import ctypes

    assert strtoll(text) == (value, whole)
    libc = ctypes.CDLL(None)
    libc.strtoll.restype = ctypes.c_longlong
    assert libc.strtoll(text.encode(), None, 0) == value


ROWS = yaml.safe_load(Path(__file__).with_name("lint_values.yaml").read_text(encoding="utf-8"))


@each_row("row", [row for rows in ROWS["environments"].values() for row in rows])
def test_codes_of_an_environment(row):
    """Names by release, settings by their place, and pairs of them; what is said of them, with its severity."""
    version = tuple(map(int, row["nccl"].split("."))) if "nccl" in row else None
    findings = found(row["sets"], version, row.get("in", ""), row.get("nodes"))
    assert [finding.code for finding in findings] == row["codes"]
    said = "\n".join(f"{finding.status.value}: {finding.message} {finding.remedy}" for finding in findings)
    assert all(words in said for words in row.get("says", ())), said
    assert not any(words in said for words in row.get("never", ())), said


@each_row(
    ("name", "value", "code"),
    [(row[0], value, code) for code, rows in ROWS["wrong"].items() for row in rows for value in row[1:]],
)
def test_wrong_without_any_machine(name: str, value: str, code: str) -> None:
    """A value outside of what the variable takes is named, whatever the host is."""
    assert [each for each in codes(name, value) if each != "env.debug.leftover"] == [code]


@each_row(("name", "value"), [(row[0], value) for row in ROWS["right"] for value in row[1:]])
def test_right_without_any_machine(name: str, value: str) -> None:
    """Nothing is said against what the documentation allows."""
    assert codes(name, value) == []
