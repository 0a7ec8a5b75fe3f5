"""The advice on every recorded machine, as an expert would read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rigs.tables import each_row

from planner.nccl_env.environment import EnvAdvice, settings
from probes.host.recording import load
from probes.scan import scan
from topology.build import build
from topology.cluster import join

MACHINES = sorted((Path(__file__).parent.parent / "machines").glob("*.json"))


def advice_for(path: Path) -> EnvAdvice:
    """Scan the recording and advise on it, as `recommend --host` does."""
    snapshot = scan(load(path))
    return settings([snapshot], join([build(snapshot)]))


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_golden_advice_on_machine(path: Path, golden: Callable[[str, Any], None]) -> None:
    """The whole advice, reasons included, stays what was read and approved."""
    advice = advice_for(path)
    told = {name: [asdict(each) for each in getattr(advice, name)] for name in ("settings", "notes", "needs")}
    golden(f"{path.stem}/settings.json", told)


def values(machine: str) -> dict[str, str]:
    """The settings of one recorded machine."""
    path = next(path for path in MACHINES if path.stem == machine)
    return {setting.name: setting.value for setting in advice_for(path).settings}


def test_p4d_gets_no_nccl_variable() -> None:
    """EFA is reached through the plugin, which sets what it needs."""
    assert not [name for name in values("aws-p4d-8xA100-4efa") if name.startswith("NCCL_")]


def test_roce_pod_gets_its_network_and_hca_by_name() -> None:
    """The two A40 behind a BlueField-3: the secondary network and the HCA on it."""
    nccl = {name: value for name, value in values("r760xa-2xA40-bf3").items() if name.startswith("NCCL_")}
    assert nccl == {"NCCL_SOCKET_IFNAME": "net1", "NCCL_IB_HCA": "mlx5_1"}


def test_nvswitch_box_gets_no_nccl_variable() -> None:
    """NCCL finds HCAs, NVLink SHARP and rails by itself."""
    assert not [name for name in values("hgx-h100-8xH100-8hca") if name.startswith("NCCL_")]


@each_row("order", [1, -1], ids=["healthy-first", "sick-first"])
def test_a_port_that_is_down_is_named_whichever_node_comes_first(order: int) -> None:
    """The evidence is that of the node whose ports decide, not of the first one."""
    paths = [path for path in MACHINES if path.stem in ("hgx-h100-8xH100-8hca", "sick-h100-dead-hca")][::order]
    snapshots = [scan(load(path)) for path in paths]
    advice = settings(snapshots, join([build(snapshot) for snapshot in snapshots]), multi_node=True)
    hca = next(setting for setting in advice.settings if setting.name == "NCCL_IB_HCA")
    assert "mlx5_3:1 is DOWN" in hca.reason.evidence
