"""Medians, fits, late ranks, and what ranks wrote down as a result; what it is held against; one benchmark at a time.

Bars are from the links of the ranks that ran, told by every host.
"""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from rigs.recorded import changed, snapshot
from rigs.tables import each_row, rows_of

from agent.checks.expect import read_expectations
from agent.checks.measured import is_judged
from agent.jobs import benchmark
from agent.jobs.benchmark import build_preflight_spec
from agent.jobs.preflight import make_required_links
from collectives.bench import processes, results, run as bench
from collectives.bench.plan import BenchSpec, Case, SpecError
from collectives.bench.processes import BusyError
from collectives.bench.rank import predict_seconds
from collectives.bench.results import Bar, spread_ratio
from collectives.bench.run import assemble, find_stragglers
from collectives.bench.watch import Outcome
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts, GpuProcess


@each_row(("values", "ratio"), [([], None), ([1.0] * 5, None), ([1.0] * 6, 0), ([1, 2, 3, 4, 5, 6], 5 / 2 / 3.5)])
def test_the_interval_needs_six_values_and_is_the_whole_range_of_them(values, ratio):
    assert spread_ratio(values) == (ratio and pytest.approx(ratio))


@each_row("n", [6, 10, 25, 100])
def test_the_interval_holds_the_true_median_in_95_of_100_cases(n):
    draw = random.Random(n)
    held = 0
    for _ in range(2000):
        values = [draw.lognormvariate(0, 0.5) for _ in range(n)]
        # From the ratio back to the interval is not possible; count by the same order statistics instead.
        half = spread_ratio(values) * median(values)
        ordered = sorted(values)
        low = next(i for i in range(n) if (ordered[n - 1 - i] - ordered[i]) / 2 == pytest.approx(half))
        held += ordered[low] <= 1.0 <= ordered[n - 1 - low]
    assert held / 2000 >= 0.95 - 3 * (0.95 * 0.05 / 2000) ** 0.5


@each_row(("settings", "named"), rows_of(__file__)("refused"))
def test_an_impossible_setting_is_refused_with_its_name_and_value(settings, named):
    with pytest.raises(SpecError) as error:
        BenchSpec(**settings)
    assert named in str(error.value)
    assert ": must be " in str(error.value)


@each_row("endpoint", ["host-0.job.space.svc:29500", "10.0.0.1:1", "[fd00::1]:29500"])
def test_names_and_addresses_are_rendezvous(endpoint):
    assert BenchSpec(hosts=2, rendezvous=endpoint).world_size == 4


@each_row("data", [None, [], {}, {"schema_version": 2}, {"schema_version": 1, "measurements": 5}])
def test_what_is_no_result_is_refused(data):
    with pytest.raises(results.ResultError):
        results.read_as(data, results.BenchResult)


# What ranks wrote down becomes a result: who differs, who is short of what, and nothing that was not said.


def joined(**changes):
    """What four ranks of two nodes say as they join; `changes` by rank."""
    usual = {"versions": {"torch": "2.13.0", "nccl": "2.27.5"}, "environment": {"NCCL_IB_HCA": "mlx5_0"}}
    rows = [{"rank": rank, "host": f"node-{rank // 2}", **usual, **{key: each[rank] for key, each in changes.items()}}
            for rank in range(4)]  # fmt: skip
    return {"event": "joined", "ranks": rows}


def measured(**changes):
    event = {"event": "measured", "op": "all_gather", "bytes": 4096, "rounds": 2, "wrong": []}
    event |= {"iteration_seconds": [1e-3] * 10, "wait_seconds": [[1e-4] * 10] * 4}
    return event | changes


def result(*events, problems=(), backend="nccl"):
    outcome = Outcome(events=list(events), problems=list(problems))
    return assemble(BenchSpec(ranks_per_host=4, backend=backend), outcome, 0.0, 1.0, None)


def test_ranks_that_are_alike_leave_no_problem():
    found = result(joined(), measured())
    assert found.complete and found.problems == ()
    assert found.hosts == ("node-0", "node-0", "node-1", "node-1")
    assert found.environment == {"NCCL_IB_HCA": "mlx5_0"}
    assert found.measurements[0].busbw_bytes_per_second == 4096 / 1e-3 * 3 / 4


def test_a_wrong_sum_that_nobody_owns_up_to_is_told_so():
    found = result(joined(), measured(wrong=[[0, -1], [1, -1]]))
    assert not found.complete and not found.measurements[0].verified
    assert found.problems == (
        "all_gather of 4096 bytes is not verified: the sum is wrong on ranks 0 to 1; "
        "all_gather shows which rank's data is wrong",
    )


def test_what_was_not_measured_or_compared_is_neither_verified_nor_whole():
    assert not result(joined(), measured(rounds=0)).measurements[0].verified
    found = result(problems=["the ranks did not join within 5 s"])
    assert not found.complete and found.measurements == () and found.hosts == ()


# Who the others wait for is named; ranks that are alike are not.


def meetings(arrivals):
    """What each rank waits at each meeting, from when each came."""
    waits = [[max(moment) - came for came in moment] for moment in arrivals]
    return [list(row) for row in zip(*waits, strict=True)]


def jitter(ranks, iterations, late, seed=0):
    """Ranks that come at random within a millisecond, some of them late."""
    draw = random.Random(seed)
    return [[draw.uniform(0, 1e-3) + late.get(rank, 0.0) for rank in range(ranks)] for _ in range(iterations)]


def named(ranks, iterations, late, seed=0):
    waits = meetings(jitter(ranks, iterations, late, seed))
    hosts = [f"host-{rank}" for rank in range(ranks)]
    return find_stragglers(hosts, waits)


@each_row("ranks", [2, 3, 8, 64])
def test_a_rank_that_is_always_late_is_named_with_its_host_and_lateness(ranks):
    (found,) = named(ranks, 40, {1: 0.010})
    assert (found.rank, found.host, found.iterations) == (1, "host-1", 40)
    assert found.late_seconds == pytest.approx(0.010, abs=0.001)
    assert found.share == 1.0
    assert "arrived last in 40 of 40 collectives" in found.why


@each_row("ranks", [2, 8, 64])
def test_ranks_that_are_alike_are_not_named(ranks):
    """One-sided at 0.001 for a whole group: two names in 100 groups would be a one in 200 draw."""
    assert sum(bool(named(ranks, 40, {}, seed)) for seed in range(100)) <= 1


def test_two_late_ranks_of_many_are_both_named_the_later_one_first():
    found = named(16, 200, {3: 0.0102, 9: 0.010})
    assert [straggler.rank for straggler in found] == [3, 9]


def test_too_few_meetings_lone_ranks_and_a_rank_late_once_name_nobody():
    assert named(4, 4, {1: 0.1}) == ()
    assert find_stragglers(["a"], [[0.1] * 50]) == ()
    arrivals = jitter(4, 50, {})
    arrivals[7][2] += 5.0
    assert find_stragglers(list("abcd"), meetings(arrivals)) == ()


def test_the_time_of_a_size_is_predicted_from_a_large_enough_one():
    """From the largest alike; not from one that is all latency."""
    small, middle = Case(op="all_gather", bytes=1 << 20), Case(op="all_gather", bytes=16 << 20)
    large = Case(op="all_gather", bytes=256 << 20)
    assert predict_seconds(large, {small: 0.2}) is None
    assert predict_seconds(large, {small: 0.2, middle: 2.0}) == 32.0
    assert predict_seconds(Case(op="reduce_scatter", bytes=16 << 20), {middle: 2.0}) == 2.0


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
    large = [case for case in spec.cases if is_judged(case.op, case.bytes, 8)]
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
    assert is_judged("all_gather", 8 << 30, 512)


def test_several_hosts_are_judged_by_the_weakest_of_them() -> None:
    """Nothing is dropped where hosts > 1, and the other host's own words count."""
    rows = [*hello("hgx-h100-8xH100-8hca", 8, ("a",)), *hello("sick-h100-nvlink-missing", 8, ("b",))]
    found = held("hgx-h100-8xH100-8hca", "all_gather", 1 << 30, rows)
    alike = held("hgx-h100-8xH100-8hca", "all_gather", 1 << 30, hello("hgx-h100-8xH100-8hca", 8, ("a", "b")))
    assert found["when healthy"] == alike["when healthy"]
    assert (found["with current links"].low or 0) < (alike["with current links"].low or 0)
    # two p5 reach 338.57 (cluster-readiness-engine)
    assert 250 * GB < (alike["with current links"].low or 0) < 338.6 * GB


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
    required = make_required_links(read_expectations(("nvlink=NV9,hcas=4,rate=400G",), None))
    found = host("hgx-h100-8xH100-8hca")
    links = build_preflight_spec(found, 8, 20, force=False, backend="nccl", required=required).links
    assert links["when healthy"]["link"]["low"] == pytest.approx(9 * 20.6 * GB)
    assert links["when healthy"]["wire"]["low"] == pytest.approx(4 * 50 * GB)
    assert links["with current links"] == benchmark.describe_links(found, 8)["with current links"]
    assert make_required_links(()) is None


def test_a_machine_whose_gpus_are_in_use_is_refused_unless_forced() -> None:
    """What the command line and the preflight both build their benchmark with. Every process is named."""
    (sound,) = host("hgx-h100-8xH100-8hca")
    gpus = sound.facts(GpuFacts)
    busy = changed(sound, GpuFacts, gpus=(replace(gpus.gpus[0], processes=(GpuProcess(pid=4711),)), *gpus.gpus[1:]))
    spec = build_preflight_spec((busy,), 2, 10, force=False)
    assert spec.gpu_pids == (4711,)
    with pytest.raises(BusyError, match="pid 4711"):
        bench.run(spec)
    assert build_preflight_spec((busy,), 2, 10, force=True).force
    with pytest.raises(BusyError, match="pid 12, pid 34"):
        processes.refuse_busy_gpus((34, 12), force=False)
    processes.refuse_busy_gpus((34, 12), force=True)
    processes.refuse_busy_gpus((), force=False)


HOLD = "import sys, time; from pathlib import Path; from collectives.bench import processes\n"
HOLD += "with processes.lock_host(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


@pytest.fixture
def holder(tmp_path):
    words = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_benchmark_is_refused_as_long_as_the_first_lives(holder, tmp_path):
    with pytest.raises(processes.BusyError, match=f"pid {holder.pid} holds"), processes.lock_host(tmp_path / "lock"):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with processes.lock_host(tmp_path / "lock"):
        pass


def test_the_lock_is_free_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), processes.lock_host(tmp_path / "lock"):
        _ = 1 / 0
    with processes.lock_host(tmp_path / "lock"):
        pass


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("content")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(OSError, match="lock"), processes.lock_host(tmp_path / "lock"):
        pass
    assert target.read_text() == "content"


def test_the_folder_of_a_killed_run_is_swept_and_that_of_a_living_one_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / f"{processes.FOLDER_PREFIX}dead"
    dead.mkdir()
    link = tmp_path / f"{processes.FOLDER_PREFIX}link"
    link.symlink_to(tmp_path)
    with processes.run_folder() as living:
        assert not dead.exists()
        processes.remove_stale_folders(tmp_path)
        assert living.exists() and living.name.startswith(processes.FOLDER_PREFIX)
    assert not living.exists() and link.exists()


def test_a_folder_is_not_swept_while_its_owner_has_yet_to_lock_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    locks = fcntl.flock

    def meanwhile(descriptor, how):
        monkeypatch.setattr(fcntl, "flock", locks)
        processes.remove_stale_folders(tmp_path)
        locks(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    with processes.run_folder() as living:
        assert fcntl.flock is locks and living.exists()
