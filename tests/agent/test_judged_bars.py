"""A measurement decides: bars and their causes, severity by cost, NVLS, MNNVL, RDMA writes, a stopped run; a search."""

import html
import json
import random
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from rigs.recorded import changed, facts, snapshot, view
from rigs.results import benchmark, measurement
from rigs.tables import each_row, rows_of

from agent import metrics
from agent.base import EXIT_FAILED, result_store
from agent.checks import measured
from agent.checks.baseline import add_baseline_bars, read_baseline
from agent.checks.measured import BUSBW, check_bars, check_benchmark, require_measured, with_bench
from agent.checks.verdict import GateError, judge
from agent.cli.bench import bench
from agent.http import pages
from agent.http.state import State
from agent.jobs import benchmark as job_benchmark, search
from agent.jobs.benchmark import check_writes, select_ports, with_bars
from bench.search import Fault, Fleet
from collectives.bench.results import Bar, BenchResult, RdmaResult, RdmaWrite, read_result
from collectives.nccl_log.transport import Evidence, ProofLine
from collectives.search.plan import DRAWN, Search, SearchResult, combine_passes
from contracts import plain
from contracts.finding import Finding
from probes.api import Snapshot
from probes.rdma.facts import RdmaFacts

rows = rows_of(__file__)

GB, GIB = 1e9, 1 << 30
HGX, TRAY = "hgx-h100-8xH100-8hca", "gb200-nvl72-tray"


def result(
    machine: str, values: dict[str, float], *, ranks: int = 8, hosts: tuple[str, ...] = ("a",), size: int = GIB,
    environment: dict[str, str] | None = None, evidence: Evidence | None = None,
) -> BenchResult:  # fmt: skip
    """What a run on this machine would have left, with these bus bandwidths in GB/s."""
    found = (snapshot(machine),)
    links = json.loads(json.dumps(job_benchmark.describe_links(found, ranks)))
    row: dict = {"links": links, "versions": {"nccl": "2.27.3"}, "environment": environment or {}}
    hello = [{**row, "host": name} for name in hosts for _ in range(ranks)]
    expect = job_benchmark.make_expect(found)
    made = [
        measurement(op, value * GB, len(hello), backend="nccl", hosts=tuple(r["host"] for r in hello), bytes=size,
                    bars=expect(op, size, hello) if expect else ())
        for op, value in values.items()
    ]  # fmt: skip
    return benchmark(
        *made, environment=environment or {}, versions={"nccl": "2.27.3"}, evidence=evidence,
        nvlink_domains=(links.get("nvlink_domain") or "",),
    )  # fmt: skip


def checks(made: BenchResult, machine: str = HGX) -> dict[tuple[str, str], Finding]:
    found = check_bars(made, (snapshot(machine),))
    return {(check.code, check.subject if check.code == BUSBW else ""): check for check in found}


@each_row(("machine", "op", "busbw", "more", "status", "message", "remedy"), rows("costs"))
def test_a_result_is_judged_by_what_it_costs(machine, op, busbw, more, status, message, remedy):
    """By the links of the machine; the cause is named."""
    check = checks(result(machine, {op: busbw}, **more), machine)[BUSBW, op]
    assert check.status == status
    assert all(words in check.message for words in (*message, " to ")), check.message
    assert all(words in check.remedy for words in remedy) and bool(check.remedy) is (status != "pass"), check.remedy
    assert len(set(more.get("hosts", "a"))) > 1 or any("NVLink" in line for line in check.evidence)


def test_small_results_are_unknown_and_never_a_pass() -> None:
    check = checks(result(HGX, {"all_gather": 5}, size=1 << 20))[BUSBW, ""]
    assert check.status == "unknown" and "64 MiB" in check.message


def test_links_that_are_not_known_make_no_verdict() -> None:
    made = result(HGX, {"all_gather": 5})
    bars = (Bar(name="with current links", why=("dark",)),)
    dark = replace(made, measurements=(replace(made.measurements[0], bars=bars),))
    assert checks(dark)[BUSBW, "all_gather"].status == "unknown"
    plain = replace(made, backend="gloo", measurements=(replace(made.measurements[0], bars=()),))
    assert checks(plain)[BUSBW, ""].status == "unknown"


def fabric(text: str, proves: str, transport: str | None = None) -> Evidence:
    line = ProofLine(line=7, text=text, proves=f"fabric: {proves}")
    return Evidence(fabric=(line,), inter_node_transport=transport)


def test_nvls_that_is_not_used_is_named_with_its_line() -> None:
    """NVIDIA/nccl#2140: 370 without, 480 with NVLS on 8 x H100."""
    log = fabric("NVLS multicast support is not available on dev 0", "NVLS multicast not available")
    check = checks(result(HGX, {"all_reduce": 370}, evidence=log))[BUSBW, "all_reduce"]
    assert check.status == "warn" and "the NVSwitch does not reduce (NVLS)" in check.message
    assert "not available on dev 0" in check.evidence[0]
    assert checks(result(HGX, {"all_reduce": 480}))[BUSBW, "all_reduce"].status == "pass"


@each_row("environment", [{"NCCL_NVLS_ENABLE": "0"}, {"NCCL_ALGO": "Ring"}])
def test_nvls_off_by_choice_is_no_fault(environment: dict[str, str]) -> None:
    found = checks(result(HGX, {"all_reduce": 365}, environment=environment))
    assert found[BUSBW, "all_reduce"].status == "pass"


def test_mnnvl_off_in_a_domain_is_named_as_the_cause() -> None:
    """191 of 721 GB/s, over InfiniBand; not where the hosts share no domain, or NCCL does use NVLink."""
    log = fabric("comm 0x1 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 0", "MNNVL off", "IB")
    made = result(TRAY, {"all_gather": 191}, ranks=4, hosts=("a", "b"), evidence=log)
    found = checks(made, TRAY)[BUSBW, "all_gather"]
    assert found.status == "fail" and "NCCL connects them over IB" in found.message and "imex" in found.remedy
    used = replace(made, evidence=Evidence(inter_node_transport="NVLink (MNNVL)"))
    for other in (used, replace(made, nvlink_domains=("one", "two"))):
        assert "share the NVLink domain" not in checks(other, TRAY)[BUSBW, "all_gather"].message


def test_a_baseline_is_the_first_bar(tmp_path):
    """Also of gloo, which no links judge: a third of what it was is a failure."""
    before = replace(result(HGX, {"all_gather": 0.3}, size=1 << 24), backend="gloo")
    before = replace(before, measurements=tuple(replace(m, backend="gloo", bars=()) for m in before.measurements))
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"schema_version": 1, "checks": [], "bench": plain.write(before)}))
    for share, status in ((1.0, "pass"), (0.75, "warn"), (0.33, "fail")):
        now = replace(before, measurements=tuple(
            replace(m, busbw_bytes_per_second=share * m.busbw_bytes_per_second) for m in before.measurements
        ))  # fmt: skip
        judged = add_baseline_bars(now, read_baseline(path).busbw)
        check = checks(judged)[BUSBW, "all_gather"]
        assert check.status == status, share
        assert "in the baseline" in check.message
        assert "300 MB/s (240 MB/s to 375 MB/s)" in measured.format_expected(judged.measurements[0])
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(plain.write(before)))  # what `bench --save` writes
    assert read_baseline(saved).busbw == read_baseline(path).busbw
    path.write_text(json.dumps({"schema_version": 1, "checks": []}))
    assert read_baseline(path).busbw == {}
    with pytest.raises(GateError, match="contains no verified benchmark"):  # it would be compared with nothing
        read_baseline(path, ("busbw",))


NDR = 400e9 / 8


def written(rate: float, port: str = "mlx5_0:1", mtu: int = 4096) -> RdmaResult:
    made = RdmaWrite(port=port, bytes=65536, writes=round(rate * 4 / 65536), seconds=4.0, bytes_per_second=rate,
                     mtu_bytes=mtu)  # fmt: skip
    return RdmaResult(host="node1", peer="node0", writes=(made,), started_at_seconds=0.0, seconds=6.0)


def judged_write(result: RdmaResult, found: Snapshot, before: dict[str, RdmaWrite] | None = None) -> Finding:
    before = before or {}
    (check,) = check_writes(with_bars(result, found, before), before)
    return check


def with_device(kind: str | None = None, **changes: object) -> Snapshot:
    """The first device, or its port, otherwise than recorded."""
    first, *others = facts(RdmaFacts).devices
    port = replace(first.ports[0], **changes)  # type: ignore[arg-type]
    return changed(snapshot(), RdmaFacts, devices=(replace(first, kind=kind or first.kind, ports=(port,)), *others))


def test_all_active_ports_in_order_and_only_those_named() -> None:
    found = snapshot()
    assert [str(port) for port in select_ports(found, ())][:2] == ["mlx5_0:1", "mlx5_1:1"]
    assert [str(port) for port in select_ports(found, ("mlx5_3", "mlx5_1:1"))] == ["mlx5_1:1", "mlx5_3:1"]
    with pytest.raises(GateError, match=r"--device mlx5_77: no ACTIVE RDMA port of that name; ACTIVE here: mlx5_0:1"):
        select_ports(found, ("mlx5_77",))


@each_row(("gigabits", "status"), [(393, "pass"), (380, "pass"), (351, "warn"), (120, "fail")])
def test_published_results_of_400_gigabit_ports(gigabits: int, status: str) -> None:
    """A healthy node and the threshold of Azure's health checks pass; a node that was taken out warns."""
    assert judged_write(written(gigabits * 1e9 / 8), snapshot()).status == status


def test_a_port_that_could_carry_more_puts_the_fault_on_the_link() -> None:
    check = judged_write(written(NDR / 3), snapshot())
    assert (check.status, check.code, check.subject) == ("fail", "bench.rdma.low_bandwidth", "mlx5_0:1")
    assert "the fault is on the link between node1 and node0, or at its other end" in check.message
    assert "the other way round" in check.remedy


def test_a_port_at_half_its_equals_rate_is_named_as_what_limits() -> None:
    """When healthy, the port has the rate of its equals; with current links, its own rate."""
    check = judged_write(written(0.97 * NDR / 2), with_device(rate_bytes_per_second=NDR / 2))
    assert check.status == "warn"
    assert "the port is what limits it: the port carries 200 Gb/s" in check.message
    assert "rdma.port.rate" in check.remedy


def test_small_packets_lower_what_a_wire_carries() -> None:
    found = with_device(link_layer="Ethernet")
    large, small = (with_bars(written(1.0, mtu=mtu), found, {}).writes[0].bars[0] for mtu in (4096, 1024))
    assert large.high == pytest.approx(NDR * 4096 / 4178)
    assert small.high == pytest.approx(NDR * 1024 / 1106)


def test_a_port_that_is_slower_than_in_the_baseline_is_the_cause() -> None:
    """The bar "with current links" has the rate and the packets of now."""
    before = {"mlx5_0:1": with_bars(written(0.97 * NDR), snapshot(), {}).writes[0]}
    check = judged_write(written(0.97 * NDR / 4), with_device(rate_bytes_per_second=NDR / 4), before)
    assert "the port is what limits it: the port carries 100 Gb/s" in check.message
    assert "in the baseline" in check.message
    ethernet = with_device(link_layer="Ethernet")
    before = {"mlx5_0:1": with_bars(written(0.97 * NDR), ethernet, {}).writes[0]}
    check = judged_write(written(0.7 * NDR, mtu=256), ethernet, before)
    assert "in packets of 256 bytes" in check.message and "rdma.mtu.small" in check.remedy


def test_a_baseline_is_what_save_wrote(tmp_path):
    path = tmp_path / "base.json"
    path.write_text(json.dumps(plain.write(written(NDR))))
    assert read_baseline(path).writes["mlx5_0:1"].bytes_per_second == NDR
    path.write_text('{"schema_version": 1, "writes": [{"port": 7}]}')
    with pytest.raises(GateError, match="not a benchmark result"):
        read_baseline(path)


def test_the_command_says_what_is_missing(tmp_path):
    """Exit code 1 where perftest is not installed."""
    missing = CliRunner().invoke(bench, ["--rdma", "node0"], env={"PATH": str(tmp_path)})
    assert missing.exit_code == 1 and "apt-get install perftest" in missing.output


ONE = measurement(bytes=65536)
WHOLE = benchmark(ONE, ONE)
CUT = replace(
    WHOLE, measurements=(ONE,), started_at_seconds=2000.0, complete=False, stopped_by="SIGTERM",
    problems=("stopped by SIGTERM: all processes of the run were ended",),
)  # fmt: skip


def ends(result: BenchResult) -> dict[str, str]:
    """What the checks of a benchmark came to, by code."""
    return {check.code: check.status for check in check_benchmark(result, ())}


def test_what_was_stopped_is_unknown_not_failed_and_not_passed() -> None:
    """The machine did nothing wrong; a run that ended of itself before its end fails as ever."""
    assert ends(WHOLE)["bench.run.incomplete"] == "pass"
    assert ends(CUT)["bench.run.incomplete"] == "unknown"
    assert ends(replace(CUT, stopped_by=None))["bench.run.incomplete"] == "fail"
    wrong = replace(CUT, measurements=(replace(ONE, verified=False),))
    assert ends(wrong)["bench.result.unverified"] == "fail"


def test_a_stopped_measurement_fails_a_preflight_and_is_unknown_to_an_agent() -> None:
    """A preflight that was to measure, and was stopped, fails; what an agent has from before stays unknown."""
    seen = with_bench(view("cpu-only-vm"), CUT)
    statuses = {check.code: check.status for check in seen.checks}
    assert statuses["bench.run.incomplete"] == "unknown"
    now = require_measured(seen.checks)
    assert {check.code: check.status for check in now}["bench.run.incomplete"] == "fail"
    assert judge(now, fail_on="fail").exit_code == EXIT_FAILED
    assert require_measured(check_benchmark(WHOLE, ())) == check_benchmark(WHOLE, ())


def test_a_stopped_run_that_measured_nothing_replaces_nothing(tmp_path):
    """One that measured something does, with its mark."""
    result_store.save_benchmark_result(WHOLE, tmp_path)
    assert result_store.save_benchmark_result(replace(CUT, measurements=()), tmp_path) is None
    assert read_result(tmp_path / result_store.BENCH_FILE) == WHOLE
    result_store.save_benchmark_result(CUT, tmp_path)
    assert read_result(tmp_path / result_store.BENCH_FILE) == CUT


HOSTILE = "gpu-3<script>&"


def searched(count: int, faults: dict[int, Fault], links: dict[tuple[int, int], float]) -> SearchResult:
    """Search a simulated fleet."""
    draw = random.Random(1)
    fleet = Fleet(domains=[""] * count, sigma=0.005, draw=draw, own=[1.0] * count, faults=faults, links=links)
    found = Search(fleet.domains)
    while tests := found.plan_round():
        found.report([fleet.run(test, set()) for test in tests])
    hosts = [HOSTILE if node == 3 else f"gpu-{node}" for node in range(count)]
    return combine_passes([found], hosts, began=1.7e9, seconds=60.0, node_minutes=8.0)


# Nodes, faults, links, codes of the findings, first line, bad nodes by metric, nodes of the picture.
RESULTS = [
    (8, {}, {}, [], "No bad node was found", 0, 8),
    (8, {3: Fault("slow", 1.0, "both")}, {}, ["search.node.slow"], f"Bad nodes: {HOSTILE}", 1, 8),
    (8, {3: Fault("dies", 0.0, "")}, {(5, 6): 3.0}, ["search.node.lost", "search.link.bad"],
     f"Bad nodes: {HOSTILE}; 1 bad link", 1, 8),
    (90, {3: Fault("stuck", 0.0, "both")}, {}, ["search.node.stuck"], f"Bad nodes: {HOSTILE}", 1, DRAWN),
]  # fmt: skip


def test_a_slow_uplink_is_named_without_a_node() -> None:
    result = replace(searched(8, {}, {}), domains=("a",) * 4 + ("b",) * 4, uplinks=(("b", 0.8),))
    (found,) = search.make_findings(result)
    assert (found.code, found.status, found.node, found.subject) == ("search.uplink.slow", "warn", "", "b")
    assert "domain b and another domain runs at 20%" in found.message


@each_row("count, faults, links, codes, first, bad, drawn", RESULTS)
def test_a_result_is_told_alike_everywhere(count, faults, links, codes, first, bad, drawn, tmp_path, monkeypatch):
    result = searched(count, faults, links)
    assert [finding.code for finding in search.make_findings(result)] == codes
    assert search.summarise(result)[0] == first

    drawing = ElementTree.fromstring(search.draw_pairs(result))  # noqa: S314 - our own
    names = [text.text or "" for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(name.startswith("✗ ") for name in names) == 2 * bad, "the row and the column of a bad node"
    assert (len(result.drawn), {3, 5, 6} <= set(result.drawn)) == (drawn, True)
    marked = [cell for cell in drawing.iter("{http://www.w3.org/2000/svg}rect") if cell.get("stroke-width")]
    assert [(cell[0].text or "").partition(":")[0] for cell in marked] == [f"gpu-{a} to gpu-{b}" for a, b in links]

    terms = json.loads(json.dumps(search.build_affinity(result)))
    fields = terms["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] if bad else []
    assert [field for term in fields for field in term["matchFields"]] == [
        {"key": "metadata.name", "operator": "NotIn", "values": [HOSTILE]}] * bad  # fmt: skip

    monkeypatch.setenv("TOPOFLIGHT_STATE", str(tmp_path))
    result_store.save_search_result(plain.write(result))
    view = State(lambda: (snapshot(),), interval_seconds=3600, folder=tmp_path).refresh()
    assert view.search == result
    exposed = metrics.expose(view, "")[0].decode()
    assert re.search(rf'^topoflight_search_nodes{{status="bad"}} {bad}\.0$', exposed, re.MULTILINE)
    page = pages.render_node_page(view, None, "", trouble=None)
    assert html.escape(first, quote=False) in page and "<script>&" not in page
    plainly = pages.render_node_page(replace(view, search=None), None, "", trouble=None)
    assert page.count("<svg") == plainly.count("<svg") + 1


SLOW = plain.write(searched(8, {3: Fault("slow", 1.0, "both")}, {}))


@each_row("text", ["", "{}", "[1]", *(json.dumps(SLOW | changes) for changes in (
    {"hosts": ["gpu-0"]}, {"drawn": [9]}, {"drawn": [0]}, {"pairs": [[0, 1]]}, {"verdicts": []}, {"seconds": "1"},
))])  # fmt: skip
def test_a_damaged_result_is_left_out(text, tmp_path):
    (tmp_path / result_store.SEARCH_FILE).write_text(text)
    assert State(lambda: (snapshot(),), interval_seconds=3600, folder=tmp_path).refresh().search is None
