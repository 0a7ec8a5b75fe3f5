"""A measurement decides: two bars, severity by cost, NVLS and MNNVL, and a baseline."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rigs.recorded import snapshot, view
from rigs.tables import each_row

from agent.checks.baseline import against_baseline
from agent.checks.baseline import read as read_baseline
from agent.checks.judged import BUSBW, MNNVL, NVLS, checks_of_bars, expected_words
from agent.checks.measured import with_bench
from agent.checks.verdict import GateError
from agent.cluster.gate import checks_of
from agent.cluster.nodes import Fleet, NodeRecord, from_resource
from agent.cluster.records import records_of, to_resource
from agent.jobs import benchmark
from collectives.bench.results import Bar, BenchResult, Measurement, result_to_json
from collectives.nccl_log.transport import Evidence, ProofLine
from contracts.finding import Finding

GB, GIB = 1e9, 1 << 30
HGX, TRAY, SICK = "hgx-h100-8xH100-8hca", "gb200-nvl72-tray", "sick-h100-nvlink-missing"


def result(
    machine: str, values: dict[str, float], *, ranks: int = 8, hosts: tuple[str, ...] = ("a",), size: int = GIB,
    environment: dict[str, str] | None = None, evidence: Evidence | None = None,
) -> BenchResult:  # fmt: skip
    """What a run on this machine would have left, with these bus bandwidths in GB/s."""
    found = (snapshot(machine),)
    links = json.loads(json.dumps(benchmark.links_of(found, ranks)))
    row: dict[str, Any] = {"links": links, "versions": {"nccl": "2.27.3"}, "environment": environment or {}}
    hello = [{**row, "host": name} for name in hosts for _ in range(ranks)]
    expect = benchmark.expected(found, ranks)
    world = tuple(range(len(hello)))
    made = [
        Measurement(
            op=op, backend="nccl", ranks=world, hosts=tuple(r["host"] for r in hello), bytes=size,
            iteration_seconds=(0.01,), median_seconds=0.01, spread_ratio=0.01, algbw_bytes_per_second=value * GB,
            busbw_bytes_per_second=value * GB, verified=True, bars=expect(op, size, world, hello) if expect else (),
        )
        for op, value in values.items()
    ]  # fmt: skip
    return BenchResult(
        measurements=tuple(made), world_size=len(hello), backend="nccl", hosts=tuple(r["host"] for r in hello),
        environment=environment or {}, versions={"nccl": "2.27.3"}, started_at_seconds=0.0, seconds=1.0,
        evidence=evidence, nvlink_domains=(links.get("nvlink_domain") or "",),
    )  # fmt: skip


def checks(made: BenchResult, machine: str = HGX) -> dict[tuple[str, str], Finding]:
    found = checks_of_bars(made, (snapshot(machine),))
    return {(check.code, check.subject if check.code == BUSBW else ""): check for check in found}


@each_row(
    ("op", "busbw", "status"),
    [
        ("all_gather", 336, "pass"), ("all_gather", 240, "warn"), ("all_gather", 100, "fail"),
        ("all_gather", 1, "fail"), ("all_reduce", 460, "pass"), ("all_reduce", 370, "warn"),
        ("all_reduce", 150, "fail"),
    ],
)  # fmt: skip
def test_a_result_is_judged_by_what_it_costs(op: str, busbw: float, status: str) -> None:
    """1 GB/s against 330 is no unknown, and 370 with NVLS expected is no pass."""
    check = checks(result(HGX, {op: busbw}))[BUSBW, op]
    assert check.status == status
    assert "as it should be" in check.message and " to " in check.message
    assert any("NVLink" in line for line in check.evidence)
    assert bool(check.remedy) is (status != "pass")


def test_a_missing_link_is_named_as_the_cause() -> None:
    """The sick node carries what its links do: no fault beyond those that are missing."""
    sick = result(SICK, {"all_gather": 250})
    check = checks(sick, SICK)[BUSBW, "all_gather"]
    assert check.status == "warn"
    assert "links are missing" in check.message and "fewer NVLinks" in check.message


def test_below_the_links_that_are_left_is_a_fault_with_an_experiment() -> None:
    alone = checks(result(HGX, {"all_gather": 150}))[BUSBW, "all_gather"]
    assert "no link shows" in alone.message and "pairs" in alone.remedy
    two = checks(result(HGX, {"all_gather": 60}, hosts=("a", "b")))[BUSBW, "all_gather"]
    assert two.status == "fail" and "between the 2 hosts" in two.message
    assert "--search" in two.remedy and "NCCL_IB_HCA" in two.remedy


def test_small_results_are_unknown_and_never_a_pass() -> None:
    check = checks(result(HGX, {"all_gather": 5}, size=1 << 20))[BUSBW, ""]
    assert check.status == "unknown" and "64 MiB" in check.message


def test_links_that_are_not_known_make_no_verdict() -> None:
    made = result(HGX, {"all_gather": 5})
    dark = replace(made, measurements=(replace(made.measurements[0], bars=(Bar(name="as it is", why=("dark",)),)),))
    assert checks(dark)[BUSBW, "all_gather"].status == "unknown"
    plain = replace(made, backend="gloo", measurements=(replace(made.measurements[0], bars=()),))
    assert checks(plain)[BUSBW, ""].status == "unknown"


def fabric(text: str, proves: str, transport: str | None = None) -> Evidence:
    line = ProofLine(line=7, text=text, proves=f"fabric: {proves}")
    return Evidence(fabric=(line,), inter_node_transport=transport)


def test_nvls_that_is_not_used_is_named_with_its_line() -> None:
    """NVIDIA/nccl#2140: 370 without, 480 with NVLS on 8 x H100."""
    log = fabric("NVLS multicast support is not available on dev 0", "NVLS multicast not available")
    check = checks(result(HGX, {"all_reduce": 370}, evidence=log))[NVLS, ""]
    assert check.status == "warn" and "NVLS is not used" in check.message
    assert "not available on dev 0" in check.evidence[0]
    assert checks(result(HGX, {"all_reduce": 480}))[NVLS, ""].status == "pass"


@each_row(("environment", "busbw"), [({"NCCL_NVLS_ENABLE": "0"}, 365), ({"NCCL_ALGO": "Ring"}, 365)])
def test_nvls_off_by_choice_is_no_fault(environment: dict[str, str], busbw: float) -> None:
    found = checks(result(HGX, {"all_reduce": busbw}, environment=environment))
    assert found[NVLS, ""].status == "info" and next(iter(environment)) in found[NVLS, ""].message
    assert found[BUSBW, "all_reduce"].status == "pass"


def test_nvls_is_not_asked_of_four_gpus() -> None:
    assert checks(result(TRAY, {"all_reduce": 630}, ranks=4), TRAY)[NVLS, ""].status == "unknown"


def test_mnnvl_off_in_a_domain_is_a_failure_of_its_own() -> None:
    """191 of 721 GB/s; the log says MNNVL 0."""
    log = fabric("comm 0x1 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 0", "MNNVL off", "IB")
    made = result(TRAY, {"all_gather": 191}, ranks=4, hosts=("a", "b"), evidence=log)
    found = checks(made, TRAY)
    assert found[MNNVL, ""].status == "fail" and "MNNVL 0" in found[MNNVL, ""].evidence[0]
    assert found[BUSBW, "all_gather"].status == "fail"
    well = replace(made, evidence=Evidence(inter_node_transport="NVLink (MNNVL)"))
    assert checks(well, TRAY)[MNNVL, ""].status == "pass"
    apart = replace(made, nvlink_domains=("one", "two"))
    assert checks(apart, TRAY)[MNNVL, ""].status == "unknown"


def test_a_baseline_is_the_first_bar(tmp_path: Path) -> None:
    """Also of gloo, which no links judge: a third of what it was is a failure."""
    before = replace(result(HGX, {"all_gather": 0.3}, size=1 << 24), backend="gloo")
    before = replace(before, measurements=tuple(replace(m, backend="gloo", bars=()) for m in before.measurements))
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"schema_version": 1, "checks": [], "bench": result_to_json(before)}))
    for share, status in ((1.0, "pass"), (0.75, "warn"), (0.33, "fail")):
        now = replace(before, measurements=tuple(
            replace(m, busbw_bytes_per_second=share * m.busbw_bytes_per_second) for m in before.measurements
        ))  # fmt: skip
        judged = against_baseline(now, read_baseline(path).busbw)
        check = checks(judged)[BUSBW, "all_gather"]
        assert check.status == status, share
        assert "as in the baseline" in check.message
        assert "300 MB/s (240 MB/s to 375 MB/s)" in expected_words(judged.measurements[0])
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(result_to_json(before)))  # what `bench --save` writes
    assert read_baseline(saved).busbw == read_baseline(path).busbw
    path.write_text(json.dumps({"schema_version": 1, "checks": []}))
    assert read_baseline(path).busbw == {}
    with pytest.raises(GateError, match="holds no verified benchmark"):  # it would be compared with nothing
        read_baseline(path, ("busbw",))


def test_a_node_is_held_against_the_best_tenth_of_its_equals() -> None:
    """A tenth is one of eleven; a node of other GPUs, and one that measured other ranks, do not count."""

    def node(name: str, busbw: float, job: str = "8 nccl ranks on 1 host", product: str = "H100") -> NodeRecord:
        measured = ({"op": "all_gather", "bytes": 1 << 29, "job": job, "busbw": round(busbw * GB)},)
        return NodeRecord(name=name, host=name, verdict="pass", scanned_at_seconds=time.time(), product=product, gpus=8,
                          measured=measured)  # fmt: skip

    fleet = Fleet()
    nodes = [*(node(f"n{i}", 330 + i) for i in range(10)), node("slow", 200), node("dead", 100)]
    others = [node("b200", 600, product="B200"), node("two", 900, job="2 nccl ranks on 1 host")]
    fleet.set(from_resource(to_resource(each)[1]) for each in (*nodes, *others))
    found = {
        check.node: check for check in checks_of([n.name for n in (*nodes, *others)], fleet) if check.code == BUSBW
    }
    assert {name for name, check in found.items() if check.status == "pass"} == {f"n{i}" for i in range(10)}
    assert (found["slow"].status, found["dead"].status) == ("warn", "fail")
    assert "best tenth of 12 equal nodes" in found["slow"].message and "338 GB/s" in found["slow"].message
    assert found["b200"].status == found["two"].status == "unknown"
    few = [*nodes[:5], node("boasts", 9000)]
    fleet.set(from_resource(to_resource(each)[1]) for each in few)
    judged = [check for check in checks_of([n.name for n in few], fleet) if check.code == BUSBW]
    assert {check.status for check in judged} == {"pass"}, "one record accuses no other node"


def test_a_benchmark_of_one_host_is_published_with_its_node() -> None:
    """Of several hosts it says nothing of one of them."""
    found = with_bench(view(HGX), result(HGX, {"all_gather": 336}))
    (record,) = records_of(found)
    (one,) = record.measured
    assert (one["op"], one["bytes"], one["busbw"]) == ("all_gather", GIB, 336 * 10**9)
    assert from_resource(to_resource(record)[1]).measured == record.measured
    several = with_bench(view(HGX), result(HGX, {"all_gather": 336}, hosts=("a", "b")))
    assert records_of(several)[0].measured == ()
