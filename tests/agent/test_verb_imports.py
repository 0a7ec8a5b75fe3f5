"""What each verb loads: a start costs its imports, so that a verb takes what it needs and nothing of the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
print(*sys.modules, file=open("/dev/fd/3", "w"))
"""


def loaded(*words: str, given: str = "") -> set[str]:
    """Names of the modules that a verb's process holds at its end."""
    shell = ["sh", "-c", '"$@" 3>&1 >/dev/null 2>/dev/null', "sh", sys.executable, "-c", CODE, *words]
    done = subprocess.run(shell, input=given, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout, words
    return set(done.stdout.split())


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
        (("topo", "--host", H100), {"planner.forecast.memory", "planner.recommend", "agent.pages", "finetune"}),
        (("lint-env", "-"), {"planner.recommend", "agent.pages", "agent.cluster", "finetune"}),
        (("recommend", "--host", H100, "--model", "Llama-3.1-8B"), {"agent.pages", "agent.cluster", "finetune"}),
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
