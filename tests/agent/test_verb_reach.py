"""How much code each verb reaches through imports, counted in lines: a verb takes what it needs and no more.

Imports inside functions count as well, since a verb that hides an import still depends on it. Imports for type
checkers only do not count.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from agent.cli.main import VERBS

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent", "planner", "topology", "collectives", "probes", "contracts", "hardware", "finetune")

# The aim of each verb, and where that is not reached yet the lines that it may reach today. A number of the second
# column is only ever lowered; it goes when the aim is reached.
LIMITS: dict[str, tuple[int, int | None]] = {
    "evidence": (5_500, None),
    "explain": (9_000, None),
    "topo": (9_000, 14_000),
    "lint-env": (9_000, 17_750),
    "scan": (16_000, 17_750),
    "recommend": (22_000, 28_000),
    "preflight": (28_000, 40_500),
}


@cache
def modules(root: Path) -> dict[str, Path]:
    """Every module below the packages by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in root.glob(f"{package}/**/*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_for_type_checkers(node: ast.AST) -> bool:
    """Whether a statement is `if TYPE_CHECKING:` in either spelling."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@cache
def imported(root: Path, name: str) -> frozenset[str]:
    """The project's modules that one module imports anywhere in its text, and the packages that it lies in."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(modules(root)[name].read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        skipped = node.body if isinstance(node, ast.If) and is_for_type_checkers(node) else []
        todo += [child for child in ast.iter_child_nodes(node) if child not in skipped]
    for each in (*found, name):
        parts = each.split(".")
        found.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return frozenset(found & modules(root).keys())


def reached(root: Path, start: str) -> dict[str, int]:
    """Every module that `start` reaches, itself included, with its number of lines."""
    lines: dict[str, int] = {}
    todo = [start]
    while todo:
        name = todo.pop()
        if name not in lines:
            lines[name] = len(modules(root)[name].read_text(encoding="utf-8").splitlines())
            todo += imported(root, name)
    return lines


@pytest.mark.parametrize("verb", LIMITS)
def test_a_verb_reaches_no_more_than_its_limit(verb: str) -> None:
    """The lines of all modules that the verb's module reaches."""
    aim, today = LIMITS[verb]
    found = reached(ROOT, VERBS[verb][0].partition(":")[0])
    total, most = sum(found.values()), today or aim
    largest: dict[str, int] = {}
    for name, lines in found.items():
        folder = ".".join(name.split(".")[:2])
        largest[folder] = largest.get(folder, 0) + lines
    named = ", ".join(f"{name} {largest[name]}" for name in sorted(largest, key=lambda n: -largest[n])[:8])
    assert total <= most, f"{verb} reaches {total} lines in {len(found)} modules (limit {most}, aim {aim}): {named}"


def test_imports_in_functions_count_and_imports_for_type_checkers_do_not(tmp_path: Path) -> None:
    """On a small tree: what is counted of each form of import."""
    texts = {
        "agent/__init__.py": "",
        "agent/cli/__init__.py": "",
        "agent/cli/verb.py": (
            "from typing import TYPE_CHECKING\nimport hardware.units\nif TYPE_CHECKING:\n    import planner.plan\n"
            "else:\n    from topology import graph\ndef run():\n    from probes.scan import scan\n"
        ),
        "hardware/__init__.py": "",
        "hardware/units.py": "import agent.cli.verb\n",
        "planner/plan.py": "",
        "topology/graph.py": "\n\n",
        "probes/scan.py": "\n\n\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert reached(tmp_path, "agent.cli.verb") == {
        "agent": 0, "agent.cli": 0, "agent.cli.verb": 8, "hardware": 0, "hardware.units": 1, "topology.graph": 2,
        "probes.scan": 3,
    }  # fmt: skip
