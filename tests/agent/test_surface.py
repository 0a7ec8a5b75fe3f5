"""Frozen outputs: the surface that users build on, and the whole product on every recorded machine.

The surface is codes, metrics, verbs, options, variables, endpoints. A difference there is a change that a user notices:
`TOPOFLIGHT_UPDATE_GOLDEN=1 pytest tests/agent/test_surface.py` rewrites it, and CHANGELOG.md says what changed. `make
golden` rewrites findings, exposition and advice; read the difference.

Metrics keep the rules of the field: names, units, labels, bounds; and the values on recorded machines.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import click
import pytest
from generate import BY_SOURCE, LABELS
from prometheus_client.parser import text_string_to_metric_families
from rigs.recorded import H100, NAMES, snapshot, view
from rigs.results import benchmark, measurement, search_result
from rigs.tables import ROOT, each_row

from agent import metrics
from agent.advice.advise import advise_view
from agent.advice.request import Request
from agent.base.options import _rows
from agent.base.output import to_document
from agent.checks.host_checks import ALL_CODES
from agent.checks.measured import with_bench
from agent.checks.view import Event, View, build_view
from agent.cli.main import VERBS, cli
from agent.cluster.client import ApiError, Tally
from agent.http.server import create
from agent.http.state import State
from agent.metrics import CATALOGUE, TABLE
from collectives.bench.results import Bar, BenchResult, Straggler
from collectives.nccl_log.codes import CODES as LOG_CODES
from collectives.nccl_log.transport import ChannelCount, Evidence, LogProblem
from contracts.plain import MisfitError
from contracts.run_record import record_of
from planner.lint.findings import CODES as ENV_CODES
from probes.api import Metric
from probes.gpu.facts import GpuFacts
from probes.pci.facts import PciFacts
from probes.registry import ALL

PACKAGES = ("probes", "topology", "collectives", "planner", "finetune", "agent")


# Code that reads an environment variable by its name.
ASKED = re.compile(r"""(?:os\.environ|host\.environment\(\)|\bgetenv)(?:\.get|\.pop)?[(\[]\s*"([^"]+)\"""")


def options(command: click.Command) -> list[str]:
    found: list[str] = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            found.append(f"{(parameter.name or '').upper()}")
        else:
            found.extend((*parameter.opts, *parameter.secondary_opts))
    return sorted(found)


@cache
def commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    return {verb: command for verb in VERBS if (command := cli.get_command(context, verb)) is not None}


def verbs() -> dict[str, list[str]]:
    return {verb: options(command) for verb, command in commands().items()}


def endpoints() -> list[str]:
    app = create(State(tuple, interval_seconds=3600))
    found = {f"{method} {route.path}" for route in app.routes for method in getattr(route, "methods", None) or ()}
    assert {f"{method.upper()} {path}" for path, item in app.openapi()["paths"].items() for method in item} <= found
    return sorted(endpoint for endpoint in found if not endpoint.startswith("HEAD "))


@cache
def variables() -> list[str]:
    """Names of the environment variables that the product reads, or that set an option."""
    options = (parameter for command in commands().values() for parameter in command.params)
    found = {str(option.envvar) for option in options if option.envvar}
    sources = [path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(found.union(*(ASKED.findall(source) for source in sources)))


def test_every_option_has_a_help_text() -> None:
    """A row of agent/base/verbs without one, or an empty row that shares nothing, is a gap on the man page."""
    found = [(verb, option) for verb, command in commands().items() for option in command.params]
    silent = [f"{verb} {one.opts}" for verb, one in found if isinstance(one, click.Option) and not one.help]
    assert not silent


def test_surface_is_frozen(golden) -> None:
    """No code, metric, verb, option, variable or endpoint comes, goes or is renamed unseen."""
    assert set(verbs()) == set(VERBS)
    golden(
        "surface.json",
        {
            "finding_codes": {"gate": sorted(ALL_CODES), "environment": sorted(ENV_CODES), "log": sorted(LOG_CODES)},
            "metrics": {family.exposed: list(family.labels) for family in metrics.CATALOGUE},
            "verbs": verbs(),
            "environment_variables": variables(),
            "endpoints": endpoints(),
        },
    )


def test_what_an_option_requires_and_excludes_exists() -> None:
    """An option that requires one which its verb lacks could never be used; a name that no verb has is misspelt."""
    every = {name for names in verbs().values() for name in names}
    wrong = []

    def own(name: str) -> str:
        return name.partition("=")[0]  # "--api=slurm": with this value alone

    for verb in {path.stem for path in (ROOT / "agent/base/verbs").glob("*.toml")} & set(verbs()):
        for option, row in _rows(verb).items():
            wrong += [f"{verb} {option}: {name}" for name in row.get("requires", ()) if own(name) not in verbs()[verb]]
            wrong += [f"{verb} {option}: {name}" for name in row.get("excludes", ()) if own(name) not in every]
    assert wrong == []


SOUND = {
    **{name: H100 for name in NAMES if name.startswith("sick-h100")},
    "sick-l40s-x4": "l40s-4x-pcie",
    "r760xa-2xA40-bf3-memlock-8MiB": "r760xa-2xA40-bf3",
}
Golden = Callable[..., None]


@each_row("name", NAMES)
def test_golden_findings(name: str, golden: Golden) -> None:
    """What the gate says, with evidence and remedy; findings that differ only in code and subject are one row."""
    found: dict = {}
    for check in to_document(view(name).checks):
        code = f"{check.pop('code')} {check.pop('subject')}".strip()
        if check["status"] != "pass":
            found.setdefault(json.dumps(check), {"codes": [], **check})["codes"].append(code)
    golden(f"{name}/findings.json", {"verdict": to_document(view(name).verdict), "checks": list(found.values())})


@each_row("name", NAMES)
def test_golden_exposition(name: str, golden: Golden) -> None:
    """Every value of one scan; of a machine that was made from a sound one, what differs from that."""
    found = samples_of(name)
    if (sound := SOUND.get(name)) is not None:
        before = samples_of(sound)
        found = [f"- {line}" for line in before if line not in set(found)] + [
            f"+ {line}" for line in found if line not in set(before)
        ]
    golden(f"{name}/metrics.txt", "\n".join(found) + "\n")


def samples_of(name: str) -> list[str]:
    """The exposition without help and types, which tests/golden/surface.json has."""
    text = metrics.expose(view(name), "")[0].decode()
    # durations and the agent's version differ from run to run
    text = re.sub(r"(topoflight_probe_duration_seconds\{.*\}) .*", r"\1 X", text)
    text = re.sub(r'topoflight_build_info\{version=".*"\}', "topoflight_build_info{...}", text)
    return [line for line in text.splitlines() if not line.startswith("#")]


@each_row("name", NAMES)
def test_golden_advice(name: str, golden: Golden) -> None:
    """Environment, and the layout for a full and a LoRA fine-tune of an 8B model; figures to two digits."""
    for method in ("lora", "full"):
        advice = advise_view(view(name), Request.of(model="Llama-3.1-8B", method=method, global_batch=64))
        golden(f"{name}/advice-{method}.json", shortened(to_document(advice)), digest=True)


def shortened(value):
    """Numbers to three digits: a golden is about the advice, not the eleventh decimal."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    return [shortened(item) for item in value] if isinstance(value, list) else value


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
    words = {ApiError(status, "").reason for status in (0, *range(100, 600))}
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
