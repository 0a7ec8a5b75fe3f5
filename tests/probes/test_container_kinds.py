"""Containers are recognised by what their engine leaves, also with a read-only root and a private cgroup namespace."""

from __future__ import annotations

from pathlib import Path

import yaml
from dicthost import DictHost
from rigs.tables import each_row

from probes.hostinfo.probe import ROLE
from probes.hostinfo.read import container, of_agent

ID = "5de52e359e15c1016d1777924320aef87fc439d8be297303af47b7d2f1e82164"
POD = "0e4d2c1a-5f6b-4a3e-9d8c-7b6a5f4e3d2c"


TEXT = Path(__file__).with_name("container_kinds.yaml").read_text(encoding="utf-8")
ROWS = yaml.safe_load(TEXT.replace("{ID}", ID).replace("{POD}", POD))


@each_row(("kind", "files", "environment"), ROWS["kinds"])
def test_container_is_known_by_its_engines_traces(
    kind: str | None, files: dict[str, str], environment: dict[str, str]
) -> None:
    """One trace is enough; a pod's stands above its engine's."""
    assert container(DictHost(dict(files), environment=environment)) == kind


def test_the_agents_container_is_one_that_says_so() -> None:
    """On a host without container `serve` shares what jobs get: its limits are judged."""
    role = {ROLE: "agent"}
    assert of_agent(DictHost({"/.dockerenv": ""}, environment=role))
    assert not of_agent(DictHost({"/.dockerenv": ""}))
    assert not of_agent(DictHost({}, environment=role))
