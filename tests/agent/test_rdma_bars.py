"""RDMA writes against the port's wire rate: what is a fault, how grave, and what is named as its cause."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rigs.recorded import changed, snapshot
from rigs.tables import each_row

from agent.checks.baseline import read as read_baseline
from agent.checks.verdict import GateError
from agent.cli.bench import bench
from agent.jobs.rdma_writes import checks_of_writes, ports_of, with_bars
from collectives.bench.results import RdmaResult, RdmaWrite, result_to_json
from contracts.finding import Finding
from probes.api import Snapshot
from probes.rdma.facts import RdmaFacts

NDR = 400e9 / 8


def measured(rate: float, port: str = "mlx5_0:1", mtu: int = 4096) -> RdmaResult:
    made = RdmaWrite(port=port, bytes=65536, writes=round(rate * 4 / 65536), seconds=4.0, bytes_per_second=rate,
                     mtu_bytes=mtu)  # fmt: skip
    return RdmaResult(host="node1", peer="node0", writes=(made,), started_at_seconds=0.0, seconds=6.0)


def judged(result: RdmaResult, found: Snapshot, before: dict[str, RdmaWrite] | None = None) -> Finding:
    before = before or {}
    (check,) = checks_of_writes(with_bars(result, found, before), before)
    return check


def with_device(kind: str | None = None, **changes: object) -> Snapshot:
    """The first device, or its port, otherwise than recorded."""
    facts = snapshot().facts(RdmaFacts)
    assert facts is not None
    first, *others = facts.devices
    port = replace(first.ports[0], **changes)  # type: ignore[arg-type]
    return changed(snapshot(), RdmaFacts, devices=(replace(first, kind=kind or first.kind, ports=(port,)), *others))


def test_all_active_ports_in_order_and_only_those_named() -> None:
    found = snapshot()
    assert [str(port) for port in ports_of(found, ())][:2] == ["mlx5_0:1", "mlx5_1:1"]
    assert [str(port) for port in ports_of(found, ("mlx5_3", "mlx5_1:1"))] == ["mlx5_1:1", "mlx5_3:1"]
    with pytest.raises(GateError, match=r"--device mlx5_77: no ACTIVE RDMA port of that name; ACTIVE here: mlx5_0:1"):
        ports_of(found, ("mlx5_77",))


@each_row(("gigabits", "status"), [(393, "pass"), (380, "pass"), (351, "warn"), (120, "fail")])
def test_published_results_of_400_gigabit_ports(gigabits: int, status: str) -> None:
    """A healthy node and the threshold of Azure's health checks pass; a node that was taken out warns."""
    assert judged(measured(gigabits * 1e9 / 8), snapshot()).status == status


def test_a_port_that_could_carry_more_puts_the_fault_on_the_link() -> None:
    check = judged(measured(NDR / 3), snapshot())
    assert (check.status, check.code, check.subject) == ("fail", "bench.rdma.low_bandwidth", "mlx5_0:1")
    assert "the fault is on the link between node1 and node0, or at its other end" in check.message
    assert "the other way round" in check.remedy


def test_a_port_at_half_its_equals_rate_is_named_as_what_limits() -> None:
    """As it should be is what the equals have; as it is, its own rate."""
    check = judged(measured(0.97 * NDR / 2), with_device(rate_bytes_per_second=NDR / 2))
    assert check.status == "warn"
    assert "the port is what limits it: the port carries 200 Gb/s" in check.message
    assert "rdma.port.rate" in check.remedy


def test_small_packets_lower_what_a_wire_carries() -> None:
    found = with_device(link_layer="Ethernet")
    large, small = (with_bars(measured(1.0, mtu=mtu), found, {}).writes[0].bars[0] for mtu in (4096, 1024))
    assert large.high == pytest.approx(NDR * 4096 / 4178)
    assert small.high == pytest.approx(NDR * 1024 / 1106)


def test_soft_roce_is_unknown_without_a_baseline_and_judged_with_one() -> None:
    found = with_device(kind="rxe")
    assert judged(measured(8e6), found).status == "unknown"
    before = {"mlx5_0:1": measured(8e6).writes[0]}
    assert judged(measured(7.5e6), found, before).status == "pass"
    slow = judged(measured(8e6 / 3), found, before)
    assert slow.status == "fail"
    assert "the port of node1 is as it was, so the fault is on the link between node1 and node0" in slow.message


def test_what_changed_since_the_baseline_is_the_cause() -> None:
    before = {"mlx5_0:1": with_bars(measured(0.97 * NDR), snapshot(), {}).writes[0]}
    slower = with_device(rate_bytes_per_second=NDR / 4)
    assert "the port runs at 100 Gb/s, 400 Gb/s in the baseline" in judged(measured(NDR / 4), slower, before).message
    assert (
        "packets of 1024 bytes, 4096 in the baseline" in judged(measured(NDR / 3, mtu=1024), snapshot(), before).message
    )


def test_a_baseline_is_what_save_wrote(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    path.write_text(json.dumps(result_to_json(measured(NDR))))
    assert read_baseline(path).writes["mlx5_0:1"].bytes_per_second == NDR
    path.write_text('{"schema_version": 1, "writes": [{"port": 7}]}')
    with pytest.raises(GateError, match="not a benchmark result"):
        read_baseline(path)


def test_the_command_says_what_is_missing_and_what_does_nothing(tmp_path: Path) -> None:
    """Exit code 1 where perftest is not installed, 2 for an option of the collectives."""
    missing = CliRunner().invoke(bench, ["--rdma", "node0"], env={"PATH": str(tmp_path)})
    assert missing.exit_code == 1 and "apt-get install perftest" in missing.output
    beside = CliRunner().invoke(bench, ["--rdma", "node0", "--op", "all_gather"])
    assert beside.exit_code == 2 and "--rdma and --op cannot be combined." in beside.output
