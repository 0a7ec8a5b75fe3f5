"""What each verb loads: a start costs its imports, so that a verb takes what it needs and nothing of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from rigs.command import python
from rigs.tables import each_row

ROOT = Path(__file__).parents[2]
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


def loaded(*words: str, given: str = "") -> set[str]:
    """Names of the modules that a verb's process holds at its end."""
    return set(python(CODE, *words, given=given).stdout.rpartition(MARK)[2].split())


@each_row(
    ("words", "without"),
    [
        (("--help",), {"rich", "cattrs", "yaml", "contracts", "probes"}),
        (("evidence", "-"), {"planner", "topology", "probes", "yaml", "agent.checks", "collectives.bench"}),
        (("evidence", "-o", "json", "-"), {"rich"}),
        (("why", "--help"), {"rich", "planner"}),
        (("serve", "--help"), {"planner", "topology", "collectives", "agent.checks.view", "agent.http.server"}),
        (("topo", "--from", MATRIX, "-o", "json"), {"rich"}),
        (("topo", "--from", MATRIX), {"planner", "collectives", "probes.scan", "probes.registry", "agent.checks.view"}),
        (("topo", "--host", H100), {"planner.forecast.memory", "planner.recommend", "agent.pages.render", "finetune"}),
        (("lint-env", "-"), {"planner.recommend", "agent.pages.render", "agent.cluster", "finetune"}),
        (("recommend", "--host", H100, "--model", "Llama-3.1-8B"), {"agent.pages.render", "agent.cluster", "finetune"}),
        (
            ("recommend", "--machine", "p5.48xlarge", "--model", "Llama-3.1-8B"),
            {"collectives", "agent.checks", "ctypes"},
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_verb_loads_what_it_needs(words: tuple[str, ...], without: set[str]) -> None:
    """No server, no other verb's readers; what is named with a package covers what lies in it."""
    found = loaded(*words, given="NCCL_DEBUG=INFO\n")
    assert "agent.cli.main" in found
    assert not {name.split(".")[0] for name in found} & SERVERS
    unneeded = {name for name in found for other in without if name == other or name.startswith(f"{other}.")}
    assert not unneeded, sorted(unneeded)


SERVE = """
import sys
sys.path.insert(0, "tests")
from rigs.agents import agent
from probes.scanner import Scanner
with Scanner() as scanner:
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
    late = {"rich", "jinja2", "torch", "pynvml", "psutil", "kubernetes", "websockets", "agent.pages.render"}
    assert not late.intersection(done.stdout.split())
