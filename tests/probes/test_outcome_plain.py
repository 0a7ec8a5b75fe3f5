"""The child's plain form of facts is the converter's, on every recorded machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cattrs
import pytest
from rigs.tables import each_row

from probes.api import Ok
from probes.host.recording import load
from probes.scan import scan
from probes.wire import outcome_from_json, outcome_to_json

MACHINES = sorted((Path(__file__).parent.parent / "machines").glob("*.json"))


@each_row("path", MACHINES, ids=lambda path: path.stem)
def test_the_same_as_the_converter_and_back(path: Path) -> None:
    for name, outcome in scan(load(path)).outcomes.items():
        plain = outcome_to_json(outcome)
        assert outcome_from_json(name, json.loads(json.dumps(plain))) == outcome
        if isinstance(outcome, Ok):
            assert json.dumps(plain["facts"]) == json.dumps(cattrs.unstructure(outcome.facts))


def test_a_fact_without_a_plain_form_is_named() -> None:
    """Nothing is lost silently."""
    with pytest.raises(TypeError, match="bytes"):
        outcome_to_json(Ok(facts=b"raw", seconds=0.0))


def test_the_child_imports_no_converter() -> None:
    """It is resident on every node."""
    code = "import probes.worker, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"cattrs", "attr", "pyroute2", "asyncio", "ssl"}.intersection(done.stdout.split())
