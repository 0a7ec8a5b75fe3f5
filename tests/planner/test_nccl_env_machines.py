"""The advice on every recorded machine, as an expert would read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

from rigs.recorded import H100, NAMES, snapshot
from rigs.tables import each_row

from planner.nccl_env.environment import EnvAdvice, settings
from topology.build import build
from topology.cluster import join


@cache
def advice_for(name: str) -> EnvAdvice:
    """The advice on one recording, as `recommend --host` gives it."""
    return settings([snapshot(name)], join([build(snapshot(name))]))


@each_row("name", NAMES)
def test_golden_advice_on_machine(name: str, golden: Callable[[str, Any], None]) -> None:
    """The whole advice, reasons included, stays what was read and approved."""
    advice = advice_for(name)
    told = {part: [asdict(each) for each in getattr(advice, part)] for part in ("settings", "notes", "needs")}
    golden(f"{name}/settings.json", told)


@each_row("order", [1, -1], ids=["healthy-first", "sick-first"])
def test_a_port_that_is_down_is_named_whichever_node_comes_first(order: int) -> None:
    """The evidence is that of the node whose ports decide, not of the first one."""
    found = [snapshot(name) for name in (H100, "sick-h100-dead-hca")][::order]
    advice = settings(found, join([build(each) for each in found]), multi_node=True)
    hca = next(setting for setting in advice.settings if setting.name == "NCCL_IB_HCA")
    assert "mlx5_3:1 is DOWN" in hca.reason.evidence
