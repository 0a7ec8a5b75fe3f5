"""NCCL on real GPUs: measured by device events, and joined with what NCCL's log proves."""

from dataclasses import replace
from pathlib import Path

import pytest
from rigs.benchmarks import measured

from agent.base.options import read_snapshots
from agent.checks.measured import check_bars
from agent.jobs.benchmark import build_preflight_spec, count_default_ranks
from collectives.bench import run as bench
from probes.registry import ALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not any(Path("/dev").glob("nvidia[0-9]*")), reason="no NVIDIA GPU on this host"),
]


def test_two_ranks_on_one_gpu_use_sockets_and_no_gdrdma(tmp_path):
    """Two NCCL_HOSTIDs make two nodes of one GPU: traffic must be reported as NET/Socket without GPUDirect RDMA."""
    one = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_IB_DISABLE": "1"}
    found = measured(tmp_path, sizes_bytes=(1 << 20, 16 << 20), distinct_hosts=True, backend="nccl", environment=one)
    assert found.complete, found.problems
    assert found.backend == "nccl" and found.versions["nccl"]
    assert all(m.verified for m in found.measurements)
    assert found.evidence.inter_node_transport == "Socket"
    assert found.evidence.gdrdma == "off"
    assert found.evidence.send.total > 0 and found.evidence.receive.total > 0


def test_two_ranks_on_one_gpu_are_held_to_no_link(tmp_path):
    """They meet in the GPU's memory: what that should carry is unknown, and says so."""
    found = read_snapshots((), ALL)
    spec = build_preflight_spec(found, 2, 20, force=True, backend="nccl")
    one = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_IB_DISABLE": "1"}
    result = bench.run(replace(spec, distinct_hosts=True, environment=one, lock_path=str(tmp_path / "lock")))
    assert result.complete, result.problems
    if count_default_ranks(found) == 1:  # else the two ranks may take a GPU each
        (check, *_) = [check for check in check_bars(result, found) if check.code == "bench.busbw.low"]
        assert check.status == "unknown"
        assert any("two ranks on one GPU" in line for line in check.evidence) or "two ranks" in check.message


def test_the_gpus_of_this_host_carry_what_their_links_should(tmp_path):
    """The gate's own measurement, on whatever links there are."""
    found = read_snapshots((), ALL)
    ranks = count_default_ranks(found)
    if ranks < 2:
        pytest.skip("one GPU: no link to measure")
    spec = build_preflight_spec(found, ranks, 20, force=True, backend="nccl")
    result = bench.run(replace(spec, lock_path=str(tmp_path / "lock")))
    assert result.complete, result.problems
    assert all(m.verified for m in result.measurements) and result.evidence is not None
    judged = [check for check in check_bars(result, found) if check.code == "bench.busbw.low"]
    assert {check.subject for check in judged} >= {"all_gather", "reduce_scatter", "all_reduce"}
    assert all(check.status != "fail" for check in judged), judged
