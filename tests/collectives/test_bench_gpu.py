"""NCCL on real GPUs: measured by device events, and joined with what NCCL's log proves."""

from pathlib import Path

import pytest

from collectives import bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not any(Path("/dev").glob("nvidia[0-9]*")), reason="no NVIDIA GPU on this host"),
]


def test_two_ranks_on_one_gpu_use_sockets_and_no_gdrdma(tmp_path):
    """Two NCCL_HOSTIDs make two nodes of one GPU: traffic must be reported as NET/Socket without GPUDirect RDMA."""
    found = bench.run(
        bench.BenchSpec(
            sizes_bytes=(1 << 20, 16 << 20),
            distinct_hosts=True,
            environment={"CUDA_VISIBLE_DEVICES": "0", "NCCL_IB_DISABLE": "1"},
            lock_path=str(tmp_path / "lock"),
        )
    )
    assert found.complete, found.problems
    assert found.backend == "nccl" and found.versions["nccl"]
    assert all(m.verified for m in found.measurements)
    assert found.evidence is not None
    assert found.evidence.inter_node_transport == "Socket"
    assert found.evidence.gdrdma == "off"
    assert found.evidence.send.total > 0 and found.evidence.receive.total > 0


def test_one_rank_for_each_gpu_is_verified(tmp_path):
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    found = bench.run(
        bench.BenchSpec(ranks_per_host=gpus, sizes_bytes=(64 << 20,), backend="nccl", lock_path=str(tmp_path / "lock"))
    )
    assert found.complete, found.problems
    assert all(m.verified for m in found.measurements)
    if gpus > 1:
        assert all(m.busbw_bytes_per_second > 0 for m in found.measurements)
        assert found.evidence is not None
