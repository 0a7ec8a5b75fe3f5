"""Every finding code of the product: the frozen surface that docs/reference/findings.md and the gate share."""

from __future__ import annotations

from agent.checks.host_checks import EXPECT_CODES
from agent.checks.measured import BENCH_CODES, RUN_CODES
from planner.lint.values import CODES as ENVIRONMENT_CODES
from probes.registry import ALL, SCAN_CODES
from topology.check import CODES as TOPOLOGY_CODES

RDMA_BENCH_CODES = ("bench.rdma.low_bandwidth",)
SEARCH_CODES = (
    "search.node.lost", "search.node.stuck", "search.node.slow", "search.node.part", "search.node.unjudged",
    "search.link.bad",
)  # fmt: skip
CLUSTER_CODES = ("cluster.node.silent", "cluster.node.verdict")
PROBE_CODES: tuple[str, ...] = tuple(code for probe in ALL for code in probe.codes)
HOST_CODES: tuple[str, ...] = (  # what a preflight of a host judges, as far as it comes
    *PROBE_CODES,
    *SCAN_CODES,
    *TOPOLOGY_CODES,
    *ENVIRONMENT_CODES,
    *EXPECT_CODES,
    *BENCH_CODES,
    *RUN_CODES,
)
ALL_CODES: tuple[str, ...] = (*HOST_CODES, *RDMA_BENCH_CODES, *SEARCH_CODES, *CLUSTER_CODES)
