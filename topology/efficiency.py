"""What part of its links' plan a healthy machine was measured to reach, with sources: the data of topology/reach.py.

Plans are NCCL's (topology/nccl.py). Every figure here is held against results of other sources by `make expect`, which
says how often it is wrong. "aic" is ai-dynamo/aiconfigurator@095f58a51, nccl_perf.parquet, 2, 4 and 8 GPUs to 512 MiB;
the other sources are named by repository.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardware.units import GIGA

MICROSECOND = 1e-6
Three = tuple[float, float, float]  # least, usual, most


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Parts of NCCL's plan, and seconds of latency."""

    # 1 / e = a + b / (n - 1): b is the copy of a rank's own part, which a ring of two feels most.
    gather: tuple[float, float]
    reduce: tuple[float, float]
    ring_margin: tuple[float, float]  # of e: least, most
    volta: float  # NVLink 2 reaches more of NCCL's 20 GB/s than later ones do of theirs
    nvls_hopper: Three
    nvls_blackwell: Three
    nvls_tree_least: float
    pcie: Three
    shared_memory: Three
    rdma: Three
    rdma_host: Three
    own_copy: float  # of all-gather and reduce-scatter over a wire, by 1 / (n - 1)
    sockets: tuple[tuple[float, float], tuple[float, float], float]  # (share, streams) least and usual; most
    start_seconds: tuple[float, float]  # slow, usual: kernel launch and first synchronisation
    step_seconds: tuple[float, float]  # slow, usual: of each step of a ring in one host
    step_seconds_between: tuple[float, float]  # the same where hosts are crossed
    nvls_rank_seconds: tuple[float, float]  # slow, usual: of NVLS, by rank
    source: str = "factors: topology/efficiency.py; `make expect` holds them against published results"

    def ring(self, op: str, ranks: int) -> float:
        """The usual part of NCCL's NVLink plan that a ring of so many ranks reaches."""
        a, b = self.reduce if op == "all_reduce" else self.gather
        return 1 / (a + b / (ranks - 1))

    def generation(self, capability: tuple[int, int] | None) -> float:
        """A generation of NVLink whose plan is further from the wire than the others'."""
        return self.volta if capability is not None and (7, 0) <= capability < (7, 5) else 1.0


# `bench/expect.py --fit` prints these from the rows; what is not fitted says where it is from.
FACTORS = Factors(
    # aic: A100, H100, H200, B200, B300, GB200, GB300, by 2, 4, 8 ranks: all-gather 0.64, 0.82, 0.90 of plan.
    gather=(1.05, 0.56),
    # aic: 0.79, 0.93, 0.93; Blackwell and Hopper with 8 ranks take NVLS and are not counted.
    reduce=(0.99, 0.34),
    ring_margin=(0.85, 1.29),
    volta=1.18,  # Panlichen/nccl-tests v100_8card_para: 126 to 135 of 120
    # aic 445 to 461 at 512 MiB, NVIDIA/nccl#2140 480, #1221 430, of 370.8; without NVLS 330 to 370.
    nvls_hopper=(1.13, 1.27, 1.43),
    # aic 684 to 704 at 512 MiB; NVIDIA/nccl#2140 845; cluster-readiness-engine 838 to 923, of 721.8; without 695.
    nvls_blackwell=(0.98, 1.11, 1.32),
    # Not fitted. Two nodes of 8 x H100: 430 to 488 (aws-do-eks, NVIDIA/nccl#1221), without NVLS 330.
    nvls_tree_least=1.04,
    # Panlichen/nccl-tests a100_8card, aic rtx_pro_6000_server, JingchaoZhang NC96ads, l40s with 2 GPUs.
    pcie=(0.45, 0.67, 1.35),
    # GeForce without peer access: Panlichen/nccl-tests 4090_2card_para 0.37, NVIDIA/nccl#1639 0.58 and 0.73.
    shared_memory=(0.30, 0.51, 0.92),
    # cluster-readiness-engine 191 of 200 and 376 of 400; 80 % is what AICR and others ask for (facts of peers).
    rdma=(0.80, 0.95, 1.03),
    # Not fitted. NVIDIA/nccl#412: 16 GB/s of 24 with the NIC at the CPU; g4dn.metal (aws-do-eks) 3.1 of 12.5.
    rdma_host=(0.20, 0.45, 1.00),
    own_copy=0.30,  # not fitted: A4, one GPU and NIC a pod (kubernetes-sigs/dranet): 36.7 out of place, 45.1 in place
    # Not fitted. One stream of TCP carries 2 GB/s and more on servers of today; NVIDIA/nccl#209: 60 % of 32 Gb/s.
    sockets=((0.60, 2.0 * GIGA), (0.92, 10.0 * GIGA), 0.98),
    # Not fitted: aic, the difference between 8 MiB and 512 MiB: 12 us and 5 us a step; NVIDIA/nccl#1218 (256 GPUs):
    # 19 us a step.
    start_seconds=(20 * MICROSECOND, 12 * MICROSECOND),
    step_seconds=(8 * MICROSECOND, 5 * MICROSECOND),
    step_seconds_between=(16 * MICROSECOND, 8 * MICROSECOND),
    nvls_rank_seconds=(20 * MICROSECOND, 11 * MICROSECOND),  # aic; coreweave/nccl-tests, 72 and 144 GPUs
)
