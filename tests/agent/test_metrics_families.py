"""Metrics by the rules of the field: names, units, labels, bounds; and the values on recorded machines."""

import math
import re
from collections import Counter
from dataclasses import replace

import pytest
from generate import BY_SOURCE, LABELS
from prometheus_client.parser import text_string_to_metric_families
from rigs.recorded import NAMES, snapshot
from rigs.results import benchmark, measurement, search_result
from rigs.tables import each_row

from agent import metrics
from agent.checks.history import Event
from agent.checks.measured import with_bench
from agent.checks.verdict import View, build_view
from agent.cluster.client import Tally, reason_of
from agent.metrics import CATALOGUE, TABLE
from collectives.bench.results import Bar, BenchResult, Straggler
from collectives.nccl_log.transport import ChannelCount, Evidence, LogProblem
from contracts.plain import MisfitError
from contracts.run_record import record_of
from probes.api import Metric
from probes.gpu.facts import GpuFacts
from probes.pci.facts import PciFacts
from probes.registry import ALL

# https://prometheus.io/docs/practices/naming/#base-units, and what people write in their place
FOREIGN_UNITS = re.compile(
    r"(_|^)(ms|msec|milliseconds|us|microseconds|ns|minutes|hours|days|kb|mb|gb|kib|mib|gib|kilobytes|megabytes|"
    r"gigabytes|bits|gbps|mbps|gbit|gbytes|percent|pct|fahrenheit|mhz|ghz|kw)(_|$)"
)


def series_bound(metric: Metric) -> tuple[str, ...]:
    """Return the factors of the most series that one host can have of the family; () is one series."""
    keys = [label for label in metric.labels if not (label == "pci_bus_id" and "gpu" in metric.labels)]
    if metric.kind == "info":  # one series per thing; what is said about the thing multiplies nothing
        keys = [label for label in keys if LABELS[label][1] in ("G", "D", "P")]
    if "code" in keys:  # a code has the severity of its case
        keys.remove("severity")
    return tuple(factor for label in keys if (factor := LABELS[label][1]))


def bench() -> BenchResult:
    """A result as a two-node run leaves it: RDMA with part of the channels in GPUDirect, one slow rank."""
    bar = Bar(name="when healthy", low=3e10, typical=4e10, high=5e10)
    made = [
        measurement(op, 1e10, backend="nccl", bytes=1 << size, expected_busbw_bytes_per_second=4e10, bars=(bar,))
        for op in ("all_gather", "reduce_scatter") for size in range(20, 31)
    ]  # fmt: skip
    return benchmark(
        *made, world_size=16, hosts=("a", "b"), started_at_seconds=1_790_000_000.0, seconds=30.0,
        stragglers=tuple(
            Straggler(rank=r, host="b", late_seconds=r / 1000, iterations=20, share=0.9) for r in range(12)
        ),
        evidence=Evidence(
            inter_node_transport="IB", intra_node_transport="P2P/CUMEM", gdrdma="partial",
            send=ChannelCount(total=16, gdrdma=12), receive=ChannelCount(total=16, gdrdma=16),
            transports={f"NET/IB/{n}": n for n in range(40)},
            problems=(LogProblem(code="gdr_partial", message="", action="", severity="fail", count=4),),
        ),
    )  # fmt: skip


RUN: dict = {
    "status": "complete", "ended_at": "2026-09-01T12:00:00Z", "steps_done": 40,
    "measured": {"step_seconds": 5.0, "memory_bytes": 4e9, "tokens_per_second": 700.0, "mfu": None},
    "plan": {"forecast": {"step_seconds": {"low": 1.0, "mid": 2.0, "high": 4.0},
                          "memory_bytes": {"low": 3e9, "mid": 4e9, "high": 5e9}}},
    "loss": {"first": 5.5, "last": 0.5},
    "communication": {"share": 0.2, "exposed_share": 0.1, "seconds_by_kind": {f"kind{n}": n for n in range(30)}},
}  # fmt: skip


@pytest.fixture(scope="module")
def full() -> View:
    return with_bench(build_view((snapshot(),), runs=(record_of(RUN),)), bench())


def samples(view: View, counted: metrics.Counted | None = None) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(metrics.expose(view, "", counted)[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@each_row("family", CATALOGUE, ids=lambda family: family.name)
def test_names_follow_the_rules(family: Metric) -> None:
    """One prefix, base units, `_total` on counters only, `_info` on what is constantly 1; known labels."""
    name = family.exposed
    assert re.fullmatch(r"topoflight_[a-z0-9]+(_[a-z0-9]+)*", name)
    assert not FOREIGN_UNITS.search(name), name
    assert (family.kind == "counter") == name.endswith("_total")
    assert (family.kind == "info") == name.endswith("_info")
    assert not re.search(r"_(count|sum|bucket)$", name), "reserved for histograms"
    if "bytes" in name and not name.endswith(("_bytes", "_per_second", "_total")):
        pytest.fail(f"{name}: the unit comes last")
    assert family.help.endswith("."), name
    for label in family.labels:
        assert label not in TABLE["forbidden_labels"], f"{family.name}: {label} is the scraper's"
        assert label in LABELS, f"{family.name}: {label} has no bound in agent/metrics.toml"
        assert label == "UUID" or re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", label)
    assert len(set(family.labels)) == len(family.labels)


def test_catalogue_has_each_name_once_and_no_label_too_many() -> None:
    """Two families of one name would be one invalid exposition."""
    names = Counter(family.name for family in CATALOGUE)
    assert max(names.values()) == 1
    assert set(LABELS) == {label for family in CATALOGUE for label in family.labels}
    assert [family for families in BY_SOURCE.values() for family in families] == list(CATALOGUE)


def test_probes_export_what_they_declare() -> None:
    """A sample of an undeclared family, or with another number of labels, would be lost unseen."""
    seen: set[str] = set()
    for name in NAMES:
        for probe in ALL:
            declared = {metric.name: metric for metric in probe.metrics}
            facts = snapshot(name).facts(probe.facts)
            for sample in probe.samples(facts) if facts is not None else ():
                assert len(sample.labels) == len(declared[sample.metric].labels), sample
                seen.add(sample.metric)
    unseen = {metric.name for probe in ALL for metric in probe.metrics} - seen
    assert unseen <= {"rdma_registered_bytes"}, f"no recording shows {sorted(unseen)}"


@each_row("machine", NAMES)
def test_exposition_keeps_the_catalogue_and_its_bounds(machine: str) -> None:
    """Every series is declared, appears once, and stays within the bound that docs/reference/metrics.md states."""
    view = with_bench(build_view((snapshot(machine),), runs=(record_of(RUN),)), bench())
    node = view.topologies[0]
    pci, gpu = view.snapshots[0].facts(PciFacts), view.snapshots[0].facts(GpuFacts)
    size = {
        "G": max(1, len(gpu.gpus) if gpu else len(node.gpus)),
        "D": max(len(pci.devices) if pci else 0, 64),
        "P": 2, "N": max(1, node.numa_nodes or 8), "O": 8, "C": len(view.checks),
    }  # fmt: skip
    declared = {family.exposed: family for family in CATALOGUE}
    shown = samples(view)
    assert len(shown) > 40
    for name, found in shown.items():
        family = declared[name]
        assert all(set(labels) == set(family.labels) for labels, _ in found), name
        assert len({tuple(sorted(labels.items())) for labels, _ in found}) == len(found), f"{name}: a series twice"
        most = math.prod(size[factor] if factor in size else int(factor) for factor in series_bound(family))
        assert len(found) <= most, f"{name}: {len(found)} series, documented are {most}"


def test_whole_catalogue_can_appear(full: View) -> None:
    """No family is dead: with a benchmark, a search, a run and a cluster one machine shows all of the agent's own."""
    counted = ("publish_interval_seconds", "publish_attempts_total", "publish_success_timestamp_seconds")
    tally = Tally(float, {(name,): 1.0 for name in counted})
    tally["publish_failures_total", "forbidden"] = 1.0
    names = {f"topoflight_{family.name}" for family in metrics.OWN}
    changed = (Event(at_seconds=1.0, kind="version", text="driver 570 -> 580", code="driver"),)
    since = {(check.code, check.subject): 1.0 for check in full.checks}
    dated = replace(full, since=since, events=changed, search=search_result(["gpu-1", "gpu-2", "gpu-3"]))
    shown = set(samples(dated, tally))
    assert names - shown <= {"topoflight_run_mfu_ratio"}  # not known on this record


def test_reasons_of_failures_are_a_closed_set() -> None:
    """The label's bound holds whatever a server answers."""
    words = {reason_of(status) for status in (0, *range(100, 600))}
    assert len(words) <= int(LABELS["reason"][1]) and "server" in words


def test_golden_exposition_of_measurements(full, golden):
    """A benchmark, a run with its forecast, and the age of each fact.

    GPUDirect RDMA is counted for send and receive apart; sizes, ranks and transports are cut; what the record does not
    say has no sample.
    """
    shown = re.compile(r"topoflight_(bench|run|gdrdma|transport|fact_timestamp|scan_timestamp)_")
    lines = metrics.expose(full, "")[0].decode().splitlines(keepends=True)
    golden("measurements.txt", "".join(line for line in lines if shown.match(line)))


@each_row("member", [{"status": 7}, {"loss": {"first": "x"}}, {"communication": 3}, {"ended_at": 5}])
def test_a_spoiled_run_record_is_refused(member: dict) -> None:
    """run.json is a file that anybody may have written: no page or scrape meets a member of the wrong kind."""
    with pytest.raises(MisfitError, match="no RunRecord"):
        record_of({**RUN, **member})
