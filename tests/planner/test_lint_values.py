"""What NCCL does with a name and the text of a value, without any machine; and whole tables, of names that are read."""

import ast
import re
from pathlib import Path
from string import Formatter

from rigs.tables import data_of, each_row, rows_of

from contracts.finding import Finding
from contracts.tables import read_table
from planner.lint.environment import SETTINGS, lint
from planner.lint.findings import CODES, TEXTS
from planner.lint.script import NamedEnvironment
from planner.lint.values import VALUES, strtoll
from planner.nccl_env import __file__ as names_file, find_plugin_of, names, torch_names

rows = rows_of(__file__, "lint_values.yaml")
ENTRIES = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
ENTRY = re.compile(r"^### `(.+)`$(?s:.*?)^- \*\*Severity:\*\* (.*?)\.", re.MULTILINE)
SEVERITIES = dict(ENTRY.findall(ENTRIES.read_text(encoding="utf-8")))


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


ROWS = data_of(__file__, "lint_values.yaml")


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


OTHERS = {
    "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "RDMAV_FORK_SAFE", "RDMAV_HUGEPAGES_SAFE", "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
}  # fmt: skip
WHERE = ("efa", "unknown", "own_net", "several_nodes", "unknown_size")


def test_every_name_is_one_that_something_reads() -> None:
    table, more = VALUES, SETTINGS
    used = {
        *(name for part in ("text", "range", "zero", "kind") for name in table[part]),
        *(name for members in table["names"].values() for name in members),
        *(name for name in (*table["quoted"], *table["words"]) if name.isupper()),
        *(name for part in ("plugin_values", "effect") for name in more[part]),
        *(name for row in more["rule"] for name in (*row["names"], *row.get("with", {}))),
        *(row["above"] for row in more["rule"] if "above" in row),
        *(row["without"] for row in more["rule"] if row.get("without", "").isidentifier()),
    }  # fmt: skip
    known = {*names(), *torch_names(), *OTHERS}
    assert not [name for name in sorted(used) if name not in known and not find_plugin_of(name)]


def test_every_row_is_whole() -> None:
    table, more = VALUES, SETTINGS
    assert set(table["names"]) == {"bytes", "flags", "same_on_all_ranks", "zero_is_unset"}
    assert not [name for name, (low, high) in table["range"].items() if low >= high]
    for row in table["text"].values():
        assert bool(row.get("words")) != (bool(re.compile(row.get("pattern", "")).pattern) and bool(row.get("wanted")))
        assert bool(row.get("effect")) != (len(row.get("separator", "")) == 1 or "numbers" in row)
    known = {"finding", "status", "names", "value", "number", "above", "with", "without", "where", "fields"}
    known |= {"times", "product"}
    for row in more["rule"]:
        assert {"finding", "names"} <= {*row} <= known and row.get("where", "efa") in WHERE
        conditions = [row.get("value", ""), row.get("without", ""), *row.get("with", {}).values()]
        assert all(re.compile(each) for each in conditions if isinstance(each, str))
        assert len(row.get("with", {})) <= 1, "the fields name one other variable"
    said = [*more["effect"].values(), *table["zero"].values()]
    said += [text for row in more["rule"] for text in row.get("fields", {}).values()]
    assert all(text and text[-1] != "." for text in said)


def test_every_text_is_used_and_filled_in() -> None:
    """Each text of findings.toml belongs to a rule, and every rule passes exactly the fields that its text has."""
    given: dict[str, set[str]] = {f"env.debug.leftover/{place}": set() for place in SETTINGS["no_effect"]}
    filled = {"above": {"other", "most"}, "with": {"other", "cause"}, "product": {"factor", "product"}}
    for row in SETTINGS["rule"]:
        fields = {*row.get("fields", {})}.union(*(filled[part] for part in filled.keys() & row.keys()))
        assert fields == given.setdefault(row["finding"], fields), row
    for path in (Path(__file__).parents[2] / "planner" / "lint").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match call:
                case ast.Call(func=ast.Name("finding"), args=[ast.Constant(str(key)), *_], keywords=words):
                    fields = {word.arg for word in words if word.arg and word.arg != "status"}
                    assert fields == given.setdefault(key, fields), key
    wanted = {
        key: {name for _, name, _, _ in Formatter().parse(text["message"] + text["remedy"]) if name} - {"name", "value"}
        for key, text in TEXTS.items()
    }
    assert given == wanted


def test_every_text_of_the_advice_is_used_and_filled_in() -> None:
    """Each text of advice.toml is named by a rule, and what a rule passes are fields of the texts that it names."""
    table, used = read_table(names_file, "data/advice.toml"), set[str]()
    planner = Path(__file__).parents[2] / "planner"
    for path in (*(planner / "nccl_env").glob("*.py"), planner / "kubernetes" / "networks.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in table}
        for call in ast.walk(tree):
            match call:
                case ast.Call(func=ast.Name("note" | "setting" | "need" as kind), args=[ast.Constant(str(key)), *more]):
                    assert key in table and ("source" in table[key]) == (kind != "note"), key
                    fields = {name for _, name, _, _ in Formatter().parse(table[key]["text"]) if name}
                    given = {word.arg for word in call.keywords}
                    continued = any(isinstance(each, ast.Starred) for each in more)
                    assert fields <= given and (continued or fields == given), key
    assert used == set(table)
