"""Imports: docs/explanation/architecture.md draws those of the packages; each verb reaches and loads what it needs.

Imports inside functions count as well, since a verb that hides an import still depends on it. Imports for type
checkers only do not count towards the lines that a verb reaches.
"""

import re
from collections import Counter
from functools import cache

import grimp
import pytest
from rigs.command import python
from rigs.tables import PYPROJECT, ROOT, each_row, rows_of

from agent.cli.main import VERBS

PACKAGES = tuple(PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def test_the_pictures_arrows_are_the_real_imports() -> None:
    """An import without an arrow, or an arrow without an import, makes the page wrong; imports in functions count."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    found = ((name, other) for name in graph.modules for other in graph.find_modules_directly_imported_by(name))
    real = {pair for a, b in found if (pair := (a.split(".")[0], b.split(".")[0])) and pair[0] != pair[1]}
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    drawn = set(re.findall(r"^\s+(\w+) --> (\w+)$", page, re.MULTILINE))
    assert drawn == real


H100 = str(ROOT / "tests/machines/hgx-h100-8xH100-8hca.json")
MATRIX = str(ROOT / "tests/golden/hgx-h100-8xH100-8hca/topology.txt")
SERVERS = {"fastapi", "starlette", "uvicorn", "jinja2", "kubernetes", "prometheus_client", "torch", "numpy"}
CODE = """
import sys
from agent.cli.main import main
sys.argv = ["topoflight", *sys.argv[1:]]
try:
    main()
except SystemExit:
    pass
print("\\n== modules", *sys.modules)
"""
MARK = "== modules"


@each_row(("words", "without"), rows_of(__file__, "verb_imports.yaml")("verbs"))
def test_a_verb_loads_what_it_needs(words: str, without: list[str]) -> None:
    """No server, no other verb's readers; what is named with a package covers what lies in it."""
    done = python(CODE, *words.format(H100=H100, MATRIX=MATRIX).split(), given="NCCL_DEBUG=INFO\n")
    found = set(done.stdout.rpartition(MARK)[2].split())
    assert "agent.cli.main" in found
    assert not {name.split(".")[0] for name in found} & SERVERS
    unneeded = {name for name in found for other in without if name == other or name.startswith(f"{other}.")}
    assert not unneeded, sorted(unneeded)


SERVE = """
import sys
sys.path.insert(0, "tests")
from rigs.agents import agent
from probes.registry import ALL
from probes.scanner import Scanner
with Scanner(probes=ALL) as scanner:
    scraped = agent(scanner.scan())
scraped.get("/metrics")
print([name for name in ("rich", "jinja2", "pynvml", "psutil") if name in sys.modules])
asked = agent()
[asked.get(path) for path in ("/", "/topology", "/metrics", "/preflight", "/recommendations?model=Llama-3.1-8B")]
print([name for name in ("torch", "kubernetes", "transformers", "numpy") if name in sys.modules])
"""


@pytest.mark.long
def test_the_resident_process_imports_neither_torch_nor_kubernetes() -> None:
    """In a fresh interpreter that has served every endpoint; nothing that draws, and no driver, for a scrape alone."""
    assert python(SERVE).stdout.split() == ["[]", "[]"]


def test_an_agent_that_nobody_has_asked_has_loaded_neither_pages_nor_drivers() -> None:
    """Drawing and page templates are loaded by the first question, drivers by the child process that scans."""
    done = python("import agent.http.server, agent.http.serve, sys; print(*sys.modules)")
    late = {"rich", "jinja2", "torch", "pynvml", "psutil", "kubernetes", "websockets", "agent.pages"}
    assert not late.intersection(done.stdout.split())


# The lines that each verb may reach; a number is only ever lowered.
LIMITS = {
    "evidence": 5_500, "explain": 9_000, "topo": 9_000, "lint-env": 9_000, "scan": 16_000, "recommend": 22_000,
    "preflight": 30_000,  # it includes the benchmark and the reader of NCCL's log
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
