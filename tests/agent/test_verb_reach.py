"""How much code each verb reaches through imports, counted in lines: a verb takes what it needs and no more.

Imports inside functions count as well, since a verb that hides an import still depends on it. Imports for type
checkers only do not count.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import grimp
from rigs.tables import each_row

from agent.cli.main import VERBS

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("agent", "planner", "topology", "collectives", "probes", "contracts", "hardware", "finetune")

# The aim of each verb, and where that is not reached yet the lines that it may reach today. A number of the second
# column is only ever lowered; it goes when the aim is reached.
LIMITS: dict[str, tuple[int, int | None]] = {
    "evidence": (5_500, None),
    "explain": (9_000, None),
    "topo": (9_000, None),
    "lint-env": (9_000, None),
    "scan": (16_000, None),
    "recommend": (22_000, None),
    "preflight": (30_000, None),  # with the benchmark and the reader of NCCL's log, which a second process had
}


@cache
def imports() -> grimp.ImportGraph:
    """Of all packages, without those for type checkers only."""
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


def reached(start: str) -> dict[str, int]:
    """Every module that `start` reaches, itself and the packages above each included, with its number of lines."""
    lines: dict[str, int] = {}
    todo = [start]
    while todo:
        name = todo.pop()
        if name not in lines:
            place = ROOT / name.replace(".", "/")
            source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            lines[name] = len(source.read_text(encoding="utf-8").splitlines())
            todo += [
                *imports().find_modules_directly_imported_by(name),
                *([above] if (above := name.rpartition(".")[0]) else []),
            ]
    return lines


@each_row("verb", LIMITS)
def test_a_verb_reaches_no_more_than_its_limit(verb: str) -> None:
    """The lines of all modules that the verb's module reaches."""
    aim, today = LIMITS[verb]
    found = reached(VERBS[verb][0])
    total, most = sum(found.values()), today or aim
    largest: dict[str, int] = {}
    for name, lines in found.items():
        folder = ".".join(name.split(".")[:2])
        largest[folder] = largest.get(folder, 0) + lines
    named = ", ".join(f"{name} {largest[name]}" for name in sorted(largest, key=lambda n: -largest[n])[:8])
    assert total <= most, f"{verb} reaches {total} lines in {len(found)} modules (limit {most}, aim {aim}): {named}"
