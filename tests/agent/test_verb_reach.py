"""How much code each verb reaches through imports, counted in lines: a verb takes what it needs and no more.

Imports inside functions count as well, since a verb that hides an import still depends on it. Imports for type
checkers only do not count.
"""

from collections import Counter
from functools import cache

import grimp
from rigs.tables import ROOT, each_row

from agent.cli.main import VERBS

PACKAGES = ("agent", "planner", "topology", "collectives", "probes", "contracts", "hardware", "finetune")

# The lines that each verb may reach; a number is only ever lowered.
LIMITS = {
    "evidence": 5_500, "explain": 9_000, "topo": 9_000, "lint-env": 9_000, "scan": 16_000, "recommend": 22_000,
    "preflight": 30_000,  # with the benchmark and the reader of NCCL's log, which a second process had
}  # fmt: skip


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
    found = reached(VERBS[verb][0])
    largest: Counter[str] = Counter()
    for name, lines in found.items():
        largest[".".join(name.split(".")[:2])] += lines
    assert largest.total() <= LIMITS[verb], f"{verb} reaches {len(found)} modules, most of all {largest.most_common(8)}"
