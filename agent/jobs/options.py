"""The options of verbs as records. Help texts (agent/base/verbs) say what each field means."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from agent.advice.request import Request
from agent.checks.verdict import FailOn


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbOptions:
    """Options of a verb. An option that is not given and has no default is None, empty or False."""

    request: Request  # hosts or machine, model, run, and the settings of the job
    require: tuple[str, ...] = ()
    measure: bool = False
    timeout: float
    folder: Path | None = None

    @classmethod
    def of(cls, ranks: int | None, **options: Any) -> Self:
        """Create the record from the options of a verb. Those that are no field here belong to the request."""
        own = {field.name: options.pop(field.name) for field in fields(cls) if field.name in options}
        return cls(request=Request.of(**options, ranks_per_node=ranks), **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(VerbOptions):
    """Where and how launch and compare-networks run a job."""

    api: str = "local"
    context: str | None = None
    image: str | None = None
    name: str
    namespace: str
    nodes: int | None = None
    resources: tuple[str, ...] = ()
    node_selector: tuple[str, ...] = ()
    tolerate: tuple[str, ...] = ()
    claim: str | None = None
    storage_class: str | None = None
    storage_size: str
    token_secret: str | None = None
    queue: str | None = None
    topology: str | None = None
    service_account: str | None = None
    preflight_image: str | None = None
    no_preflight: bool = False
    agent: str | None = None
    dra: tuple[str, ...] = ()
    no_compute_domain: bool = False
    with_network: bool = False
    host_mofed: bool | None = None
    restarts: int | None = None
    storage_rate: int | None = None
    partition: str | None = None  # Slurm, up to sbatch
    exclude: str | None = None
    over: str | None = None
    time_limit: str | None = None
    sbatch: tuple[str, ...] = ()
    dry_run: bool = False
    form: str = "yaml"  # of --dry-run
    networks: tuple[str, ...] = ()  # compare-networks --over
    steps: int | None = None
    price: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions(VerbOptions):
    """What preflight checks, measures and trains, and which results fail."""

    train: bool
    quick: bool
    bench_seconds: float | None
    force: bool
    skip: tuple[str, ...]
    fail_on: FailOn
    baseline: Path | None
    expect: tuple[str, ...]
    expect_file: Path | None
    nodes: str | None  # names of a cluster's nodes, as a host list
    selector: str | None
    context: str | None
