"""What a benchmark and a training run leave behind, with the figures that a test names and usual ones for the rest."""

from collections.abc import Collection, Sequence
from typing import Any

from collectives.bench.results import BenchResult, Measurement
from collectives.search.plan import SearchResult, Verdict

# As the job writes it, with every member that the agent needs.
RUN: dict[str, Any] = {
    "schema_version": 1, "status": "complete", "exit_code": 0, "reason": None, "host": "sft-0", "notes": [],
    "started_at": "2026-11-01T10:00:00Z", "ended_at": "2026-11-01T10:05:00Z", "steps_done": 7,
    "loss": {"first": 5.0, "last": 3.0},
}  # fmt: skip


def measurement(op: str = "all_gather", busbw: float = 1e9, ranks: int = 2, **more: Any) -> Measurement:
    """One verified collective; its bus bandwidth in bytes per second."""
    usual: dict[str, Any] = {
        "backend": "gloo", "ranks": tuple(range(ranks)), "hosts": ("a",) * ranks, "bytes": 1 << 16,
        "iteration_seconds": (0.001,) * 9, "median_seconds": 0.001, "spread_ratio": 0.04,
        "algbw_bytes_per_second": busbw, "busbw_bytes_per_second": busbw, "verified": True,
    }  # fmt: skip
    return Measurement(op=op, **{**usual, **more})


def benchmark(*measured: Measurement, **more: Any) -> BenchResult:
    """A run that measured these, over the ranks of the first one."""
    first = measured[0]
    usual: dict[str, Any] = {
        "world_size": len(first.ranks), "backend": first.backend, "hosts": first.hosts, "environment": {},
        "versions": {}, "started_at_seconds": 1000.0, "seconds": 3.0,
    }  # fmt: skip
    return BenchResult(measurements=measured, **{**usual, **more})


def search_result(hosts: Sequence[str], bad: Collection[int] = ()) -> SearchResult:
    """A search of these hosts that found some of them stuck."""
    verdicts = tuple(
        Verdict(node=node, state="bad", reason="stuck") if node in bad else Verdict(node=node, state="good")
        for node in range(len(hosts))
    )
    return SearchResult(
        hosts=tuple(hosts), domains=("",) * len(hosts), began=1.7e9, seconds=60.0, verdicts=verdicts, links=(),
        rounds=4, tests=5, node_minutes=8.0, visible_loss=0.05, tested_pairs=0, drawn=(), pairs=(),
    )  # fmt: skip
