"""All finding codes of the product, and findings with the texts of findings.toml next to this module."""

from __future__ import annotations

from dataclasses import replace

from contracts.finding import Finding, Status
from contracts.tables import read_table
from planner.lint.findings import CODES as ENVIRONMENT_CODES
from probes.api import finding
from probes.registry import ALL, SCAN_CODES
from topology.check import CODES as TOPOLOGY_CODES

_TEXTS = read_table(__file__, "findings.toml")


def make_finding(
    key: str, node: str, status: Status | None = None, *, subject: str = "", evidence: tuple[str, ...] = (),
    **values: object,
) -> Finding:  # fmt: skip
    """Create the finding with this key of findings.toml for a node, and fill in its texts."""
    return replace(finding(_TEXTS, key, status, subject, evidence, **values), node=node)


def _list_codes(*families: str) -> tuple[str, ...]:
    """Return the codes of findings.toml that begin with one of these words."""
    return tuple(dict.fromkeys(code for key in _TEXTS if (code := key.split()[0]).startswith(families)))


EXPECT_CODES = _list_codes("expect.")
RDMA_BENCH_CODES = _list_codes("bench.rdma.")
BENCH_CODES = tuple(code for code in _list_codes("bench.", "evidence.") if code not in RDMA_BENCH_CODES)
RUN_CODES = _list_codes("run.", "forecast.")
SEARCH_CODES = _list_codes("search.")
CLUSTER_CODES = _list_codes("cluster.")
PROBE_CODES: tuple[str, ...] = tuple(code for probe in ALL for code in probe.codes)
HOST_CODES: tuple[str, ...] = (  # checks that a preflight of a host can perform
    *PROBE_CODES, *SCAN_CODES, *TOPOLOGY_CODES, *ENVIRONMENT_CODES, *EXPECT_CODES, *BENCH_CODES, *RUN_CODES,
)  # fmt: skip
ALL_CODES: tuple[str, ...] = (*HOST_CODES, *RDMA_BENCH_CODES, *SEARCH_CODES, *CLUSTER_CODES)
"""Every finding code of the product: the frozen surface that docs/reference/findings.md and the gate share."""
