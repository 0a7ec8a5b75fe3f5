"""ConfigMaps that Grafana's sidecar loads (label grafana_dashboard): one per dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

NOTE = "# Made by dashboards/generate.py; change dashboards/boards.py.\n"


class _Literal(str):
    """Text that is written as a block, so that a reader can read it."""


class _Dumper(yaml.SafeDumper):
    """Safe dumper that knows blocks."""


def _block(dumper: yaml.SafeDumper, data: _Literal) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(data), style="|")


_Dumper.add_representer(_Literal, _block)


def text(drawn: Mapping[str, str]) -> str:
    """All ConfigMaps as one YAML stream."""
    return NOTE + yaml.dump_all([_map(name, body) for name, body in drawn.items()], Dumper=_Dumper, sort_keys=False)


def _map(name: str, body: str) -> dict[str, Any]:
    stem = name.removesuffix(".json")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"topoflight-dashboard-{stem}",
            "labels": {"app.kubernetes.io/name": "topoflight", "grafana_dashboard": "1"},
            "annotations": {"grafana_folder": "Topoflight"},
        },
        "data": {f"topoflight-{name}": _Literal(body)},
    }
