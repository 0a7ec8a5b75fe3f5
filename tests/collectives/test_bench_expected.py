"""What a measurement is held against: the links' bandwidth at large sizes, NCCL's latency at small ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.benchmark import default_ranks, preflight_spec
from agent.hosts import snapshots
from collectives import bench
from collectives.latency import nccl_latency
from collectives.lock import BusyError
from collectives.spec import Expectation
from probes.gpu import GpuFacts, GpuProcess

MACHINES = Path(__file__).parents[1] / "machines"


@pytest.mark.parametrize(
    ("op", "ranks", "nodes", "link", "microseconds"),
    [
        ("all_gather", 8, 1, "NVLink", 6.6 + 7 * 0.6),
        ("reduce_scatter", 4, 1, "PCIe", 6.6 + 3 * 1.0),
        ("all_gather", 16, 2, "NVLink", 6.6 + 14 * 1.0 + 1 * 2.7),  # each step costs the network's overhead
        ("all_gather", 2, 2, "PCIe", 6.6 + 5.0),  # one rank a node: the network's latency is exposed
        ("all_reduce", 8, 1, "NVLink", 6.6 + 14 * 0.6),  # below the tree's 6.8 + 14 x 0.6
        ("all_reduce", 16, 16, "PCIe", 6.8 + 2 * 4 * 5.0),  # the tree is far below the ring's 6.6 + 30 x 5
    ],
)
def test_latency_is_that_of_nccls_model(op: str, ranks: int, nodes: int, link: str, microseconds: float) -> None:
    """By hand from the constants of tuning.cc."""
    found = nccl_latency(op, ranks=ranks, nodes=nodes, link=link)
    assert found is not None
    assert found[0] * 1e6 == pytest.approx(microseconds)
    assert f"{microseconds:.1f} us" in found[1]
    assert "tuning.cc" in found[1]


@pytest.mark.parametrize(("op", "ranks", "nodes"), [("broadcast", 8, 1), ("all_gather", 1, 1), ("all_gather", 9, 2)])
def test_what_the_model_does_not_cover_has_no_latency(op: str, ranks: int, nodes: int) -> None:
    assert nccl_latency(op, ranks=ranks, nodes=nodes, link="NVLink") is None


def test_small_sizes_are_held_against_the_latency_and_large_ones_against_the_links() -> None:
    """8 GPUs at 370 GB/s: 1 MiB cannot come near the wire, 16 GiB must."""
    latency = nccl_latency("all_gather", ranks=8, nodes=1, link="NVLink")
    assert latency is not None
    expected = Expectation(op="all_gather", busbw_bytes_per_second=370e9, latency_seconds=latency[0])
    small, large = expected.busbw_at(65536, 8), expected.busbw_at(16 << 30, 8)
    assert small is not None
    assert large is not None
    assert small == pytest.approx(65536 * 7 / 8 / (10.8e-6 + 65536 * 7 / 8 / 370e9))
    assert small < 0.02 * 370e9
    assert large > 0.999 * 370e9


@pytest.mark.parametrize(
    ("machine", "microseconds", "link"),
    [("hgx-h100-8xH100-8hca", 6.6 + 7 * 0.6, "NVLink"), ("l40s-4x-pcie", 6.6 + 3 * 1.0, "PCIe")],
)
def test_a_machines_expectations_carry_a_latency_and_its_source(machine: str, microseconds: float, link: str) -> None:
    found = snapshots((MACHINES / f"{machine}.json",))
    spec = preflight_spec(found, default_ranks(found), 10, force=False)
    gather = next(expected for expected in spec.expectations if expected.op == "all_gather")
    assert gather.latency_seconds * 1e6 == pytest.approx(microseconds)
    assert f"by {link}" in gather.derivation[-1]


def test_a_machine_whose_gpus_are_in_use_is_refused_unless_forced() -> None:
    """What the command line and the preflight both build their benchmark with."""
    (host,) = snapshots((MACHINES / "hgx-h100-8xH100-8hca.json",))
    gpus = host.facts(GpuFacts)
    assert gpus is not None
    taken = replace(gpus, gpus=(replace(gpus.gpus[0], processes=(GpuProcess(pid=4711),)), *gpus.gpus[1:]))
    outcomes = {name: replace(o, facts=taken) if name == "gpu" else o for name, o in host.outcomes.items()}
    busy = replace(host, outcomes=outcomes)
    spec = preflight_spec((busy,), 2, 10, force=False)
    assert spec.gpu_pids == (4711,)
    with pytest.raises(BusyError, match="pid 4711"):
        bench.run(spec)
    assert preflight_spec((busy,), 2, 10, force=True).force
