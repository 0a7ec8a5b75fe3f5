"""The texts of the findings of probes and topology fit the code that fills them in."""

import ast
import dataclasses
import importlib
from string import Formatter

from rigs.tables import ROOT, each_row

from contracts.finding import Status
from contracts.tables import read_table
from probes.gpu.health import WORDS
from probes.registry import ALL

FOLDERS = [*(f"probes/{probe.name}" for probe in ALL), "topology"]
BETWEEN_SCANS = ROOT / "probes" / "increases.py"


def _texts(row: dict) -> list[str]:
    seen = row.get("evidence", [])
    return [row["message"], row.get("remedy", ""), *([seen] if isinstance(seen, str) else seen)]


@each_row("folder", FOLDERS)
def test_every_row_of_a_finding_is_raised_and_filled_in(folder: str) -> None:
    """A row has known members and a remedy; code has its key, and passes what its texts name."""
    paths = [*sorted((ROOT / folder).glob("*.py")), BETWEEN_SCANS]
    modules = [importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in paths]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words |= set(WORDS["rule"]) if folder == "probes/gpu" else set()  # findings that one fact decides
    passed = {node.arg for node in nodes if isinstance(node, ast.keyword)} | words | {"subject"}
    facts = {
        field.name for module in modules for kind in vars(module).values() if dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
    }  # fmt: skip
    wrong = []
    for key, row in read_table(str(ROOT / folder / "_"), "findings.toml").items():
        code, _, case = key.partition(" ")
        known = row.keys() <= {"status", "message", "evidence", "remedy"} and "message" in row
        status = row.get("status", "info")
        known = known and status in set(Status) and ("remedy" in row or status == "info")
        # whole, its two parts apart, or with a value as its second part
        raised = key in words or (code in words and {case, f" {case}"} & words) or f"{code} " in words
        wrong += [] if known and raised else [key]
        for _, name, _, _ in (part for text in _texts(row) for part in Formatter().parse(text)):
            root, _, fact = (name or "subject").partition(".")
            if root not in passed or (fact and fact not in facts):
                wrong.append(f"{key}: {{{name}}}")
    assert wrong == []
