"""What NCCL does with a name and the text of a value, without any machine."""

import re
from pathlib import Path

import yaml
from rigs.tables import each_row, rows_of

from contracts.finding import Finding, Status
from planner.lint.environment import lint
from planner.lint.script import NamedEnvironment
from planner.lint.values import CODES, strtoll

rows = rows_of(__file__, "lint_values.yaml")
SETTINGS = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
ENTRY = re.compile(r"^### `(.+)`$(?s:.*?)^- \*\*Severity:\*\* (.*?)\.", re.MULTILINE)
SEVERITIES = dict(ENTRY.findall(SETTINGS.read_text(encoding="utf-8")))


def found(environment: dict[str, str], version: tuple[int, ...] | None = (2, 27, 7), source: str = "") -> list[Finding]:
    """All findings, each with a code that is announced, a severity that its entry has, evidence and a remedy."""
    findings = lint(NamedEnvironment(environment=environment, source=source), nccl_version=version)
    for finding in findings:
        assert finding.code in CODES, finding
        assert finding.status.value in SEVERITIES[finding.code].split(" or "), finding
        assert finding.evidence[0].startswith(f"{finding.subject}="), finding
        assert finding.remedy.endswith(".") and finding.message.endswith("."), finding
    return list(findings)


def codes(environment: dict[str, str], version: tuple[int, ...] | None = (2, 27, 7), source: str = "") -> list[str]:
    """The codes alone."""
    return [finding.code for finding in found(environment, version, source)]


@each_row(("text", "value", "whole"), rows("strtoll"))
def test_strtoll_as_the_c_library(text: str, value: int, whole: bool) -> None:
    """Base 0: decimal, 0x hexadecimal, leading 0 octal; the rest is dropped."""
    import ctypes

    assert strtoll(text) == (value, whole)
    libc = ctypes.CDLL(None)
    libc.strtoll.restype = ctypes.c_longlong
    assert libc.strtoll(text.encode(), None, 0) == value


def test_the_seed_name_that_no_nccl_reads() -> None:
    """NCCL_IB_HBA does nothing; NCCL_IB_HCA is meant, and stays at its default."""
    (finding,) = found({"NCCL_SOCKET_IFNAME": "net1", "NCCL_IB_HBA": "mlx5_1"})
    assert finding.code == "env.name.unknown"
    assert finding.remedy == "Did you mean NCCL_IB_HCA? Correct the name, or unset it."
    assert "all ACTIVE ports" in finding.message


@each_row(("name", "value", "says"), rows("otherwise"))
def test_numbers_that_nccl_reads_otherwise(name: str, value: str, says: str) -> None:
    """Every finding tells the number NCCL really takes."""
    findings = [finding for finding in found({name: value}) if finding.code == "env.value.ignored"]
    assert len(findings) == 1
    assert says in findings[0].message


@each_row(("name", "value", "severity"), rows("as_severe"))
def test_text_in_place_of_a_number_is_as_severe_as_the_number_that_nccl_reads(name, value, severity):
    assert [f.status for f in found({name: value}) if f.code == "env.value.ignored"] == [severity]


@each_row(("value", "version", "fails"), rows("algorithms"))
def test_algorithms(value: str, version: tuple[int, ...], fails: bool) -> None:
    """Since 2.24 an unknown token, or a choice that leaves all-gather nothing, ends the job."""
    severities = {finding.status for finding in found({"NCCL_ALGO": value}, version)}
    assert (Status.FAIL in severities) == fails


@each_row(("name", "value", "clean"), rows("match_nothing"))
def test_lists_that_match_nothing(name: str, value: str, clean: str) -> None:
    """The signs count at the start only, spaces and semicolons are part of a name."""
    (finding,) = found({name: value})
    assert finding.code == "env.value.list"
    assert finding.remedy == f"Write {name}={clean}."


def test_worst_comes_first() -> None:
    """FAIL before WARN before INFO."""
    severities = [f.status for f in found({"NCCL_NVLS_ENABLE": "0", "NCCL_IB_HBA": "x", "NCCL_ALGO": "Rings"})]
    assert severities == sorted(severities, key=(Status.FAIL, Status.WARN, Status.INFO).index)


SINCE = (2, 27, 7)
ROWS = yaml.safe_load(Path(__file__).with_name("lint_values.yaml").read_text(encoding="utf-8"))


@each_row("row", [row for rows in ROWS["environments"].values() for row in rows])
def test_codes_of_an_environment(row):
    """Names by release, settings by where they stand, and pairs of them; what is said of them, with its severity."""
    version = tuple(map(int, row["nccl"].split("."))) if "nccl" in row else None
    findings = found(row["sets"], version, row.get("in", ""))
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
    assert [each for each in codes({name: value}, None) if each != "env.debug.leftover"] == [code]


@each_row(("name", "value"), [(row[0], value) for row in ROWS["right"] for value in row[1:]])
def test_right_without_any_machine(name: str, value: str) -> None:
    """Nothing is said against what the documentation allows."""
    assert codes({name: value}, None) == []


@each_row(("value", "version", "expected"), [
    ("NVL", SINCE, []), ("C2C", (2, 21, 5), ["env.value.level"]), ("C2C", SINCE, []),
])  # fmt: skip
def test_levels(value: str, version: tuple[int, ...], expected: list[str]) -> None:
    """Exact upper-case names, each since its release; anything else is ignored in silence."""
    for name in ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"):
        assert [code for code in codes({name: value}, version) if code != "env.debug.leftover"] == expected


@each_row(("environment", "nodes", "severity"), rows("interface"))
def test_an_interface_of_one_host_in_a_job_of_several(environment, nodes, severity):
    """Loopback and bridges reach no other node; how bad that is follows from the job's size."""
    findings = [
        each
        for each in lint(NamedEnvironment(environment=environment), nodes=nodes)
        if each.code == "env.interface.unfit"
    ]
    assert [each.status for each in findings] == ([] if severity is None else [severity])


@each_row(("name", "value", "meant"), rows("guesses"))
def test_a_guess_is_a_question_without_a_value(name: str, value: str, meant: str) -> None:
    """Only where the letters are close, whatever the value; never as the remedy itself."""
    (finding,) = found({name: value}, None)
    assert finding.code == "env.name.unknown"
    assert "Write " not in finding.remedy
    assert ("Did you mean" in finding.remedy) == bool(meant)
    assert not meant or f"Did you mean {meant}" in finding.remedy
    assert f"={value}" not in finding.remedy
