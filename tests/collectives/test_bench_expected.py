"""What a benchmark is held against: bars from the links of the ranks that ran, told by every host."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from rigs.recorded import changed, snapshot
from rigs.tables import each_row, rows_of

from agent.checks import measured
from agent.checks.expect import read_expectations
from agent.jobs import benchmark
from agent.jobs.benchmark import build_preflight_spec
from agent.jobs.preflight import make_due
from collectives.bench import run as bench
from collectives.bench.processes import BusyError
from collectives.bench.results import Bar
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts, GpuProcess

rows = rows_of(__file__)

GB = 1e9


def host(name: str) -> tuple[Snapshot, ...]:
    return (snapshot(name),)


def hello(machine: str, ranks: int, hosts: Sequence[str] = ("a",), **more) -> list[Mapping]:
    """What the ranks say of themselves, through JSON as they do."""
    links = json.loads(json.dumps(benchmark.describe_links(host(machine), ranks)))
    row = {"links": links, "versions": {"nccl": "2.27.3"}, "environment": {}, **more}
    return [{**row, "host": name} for name in hosts for _ in range(ranks)]


def held(machine: str, op: str, size: int, rows: Sequence[Mapping]) -> dict[str, Bar]:
    expect = benchmark.make_expect(host(machine))
    return {bar.name: bar for bar in expect(op, size, rows)}


def test_preflight_spends_its_budget_on_what_is_judged() -> None:
    """A short sweep for the curve, then 64 MiB of every rank for all three; `quick` only these."""
    found = host("hgx-h100-8xH100-8hca")
    spec = build_preflight_spec(found, 8, 20, force=False, backend="nccl")
    large = [case for case in spec.cases if measured.is_judged(case.op, case.bytes, 8)]
    assert {case.op for case in large} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert {case.bytes for case in large} == {512 << 20}
    assert len({case.bytes for case in spec.cases}) == 4
    quick = build_preflight_spec(found, 8, 6, force=False, quick=True, backend="nccl")
    assert quick.cases == tuple(large)
    two = build_preflight_spec(found, 8, 20, force=False, hosts=2, backend="nccl")
    assert max(case.bytes for case in two.cases) == 1 << 30
    assert max(case.bytes for case in build_preflight_spec(found, 8, 20, force=False, backend="gloo").cases) == 16 << 20
    crowd = build_preflight_spec(found, 8, 20, force=False, hosts=64, backend="nccl")
    assert max(case.bytes for case in crowd.cases) == 8 << 30  # not 32 GiB in addition to whatever else is in memory
    assert measured.is_judged("all_gather", 8 << 30, 512)


def test_several_hosts_are_judged_by_the_weakest_of_them() -> None:
    """Nothing is dropped where hosts > 1, and the other host's own words count."""
    rows = [*hello("hgx-h100-8xH100-8hca", 8, ("a",)), *hello("sick-h100-nvlink-missing", 8, ("b",))]
    found = held("hgx-h100-8xH100-8hca", "all_gather", 1 << 30, rows)
    alike = held("hgx-h100-8xH100-8hca", "all_gather", 1 << 30, hello("hgx-h100-8xH100-8hca", 8, ("a", "b")))
    assert found["when healthy"] == alike["when healthy"]
    assert (found["with current links"].low or 0) < (alike["with current links"].low or 0)
    assert (
        250 * GB < (alike["with current links"].low or 0) < 338.6 * GB
    )  # two p5 reach 338.57 (cluster-readiness-engine)


def test_hosts_of_unknown_links_and_gloo_have_no_expected_rate() -> None:
    rows = [*hello("hgx-h100-8xH100-8hca", 8, ("a",)), *hello("hgx-h100-8xH100-8hca", 8, ("b",), links={})]
    found = held("hgx-h100-8xH100-8hca", "all_gather", 1 << 30, rows)
    assert found and all(bar.low is None and "not known" in bar.why[0] for bar in found.values())
    of_gloo = hello("hgx-h100-8xH100-8hca", 8, versions={"torch": "2.9"})
    assert held("hgx-h100-8xH100-8hca", "all_gather", 1 << 30, of_gloo) == {}
    assert benchmark.make_expect(host("cpu-only-vm")) is None


@each_row(("environment", "version", "algorithm"), rows("algorithm"))
def test_the_algorithm_is_that_of_version_and_environment(environment, version, algorithm):
    rows = hello("hgx-h100-8xH100-8hca", 8, environment=environment, versions={"nccl": version})
    found = held("hgx-h100-8xH100-8hca", "all_reduce", 1 << 30, rows)["with current links"]
    assert found.algorithm == algorithm
    assert any("by a setting" in why for why in found.why) is bool(environment and algorithm == "ring")


def test_what_the_owner_expects_goes_before_the_recognised_machine() -> None:
    """`--expect nvlink=NV9,hcas=4,rate=400G`: what was bought, on a board that the table does not know."""
    due = make_due(read_expectations(("nvlink=NV9,hcas=4,rate=400G",), None))
    found = host("hgx-h100-8xH100-8hca")
    links = build_preflight_spec(found, 8, 20, force=False, backend="nccl", due=due).links
    assert links["when healthy"]["link"]["low"] == pytest.approx(9 * 20.6 * GB)
    assert links["when healthy"]["wire"]["low"] == pytest.approx(4 * 50 * GB)
    assert links["with current links"] == benchmark.describe_links(found, 8)["with current links"]
    assert make_due(()) is None


def test_a_machine_whose_gpus_are_in_use_is_refused_unless_forced() -> None:
    """What the command line and the preflight both build their benchmark with."""
    (sound,) = host("hgx-h100-8xH100-8hca")
    gpus = sound.facts(GpuFacts)
    busy = changed(sound, GpuFacts, gpus=(replace(gpus.gpus[0], processes=(GpuProcess(pid=4711),)), *gpus.gpus[1:]))
    spec = build_preflight_spec((busy,), 2, 10, force=False)
    assert spec.gpu_pids == (4711,)
    with pytest.raises(BusyError, match="pid 4711"):
        bench.run(spec)
    assert build_preflight_spec((busy,), 2, 10, force=True).force
