"""The job plan: the document that the launcher writes, every rank reads, and the run record contains.

plan.json holds the settings, as given by a file or by the planner, the layout, its forecast, the environment, and the
transport that NCCL should use between hosts. The ConfigMap and `plan` in run.json hold the same document.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts import bounded, plain, trl
from contracts.finding import Interval
from contracts.job_config import (
    DEFAULT_CONFIG,
    MAX_FILE_BYTES,
    ConfigError,
    JobConfig,
    parse_config,
    read_config,
    read_mapping,
    with_overrides,
)
from contracts.layout import Layout, LayoutError

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedValue:
    """One component of a forecast: "gemm" in seconds, "activations" in bytes."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecast:
    """Forecast of the run. None means not forecast."""

    step_seconds: Interval | None = None
    memory_bytes: Interval | None = None
    time_parts: list[NamedValue] = field(default_factory=list)
    memory_parts: list[NamedValue] = field(default_factory=list)

    @property
    def allocated_bytes(self) -> Interval | None:
        """Part of memory_bytes that tensors use, without allocator fragmentation, workspaces and the CUDA context."""
        due, other_parts = self.memory_bytes, ("fragmentation", "reserved", "context")
        if due is None or not self.memory_parts:
            return None
        total = sum(part.value for part in self.memory_parts)
        share = sum(part.value for part in self.memory_parts if part.name not in other_parts) / total
        return Interval(low=due.low * share, mid=due.mid * share, high=due.high * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The content of plan.json. If the layout is None, the settings and the number of started ranks determine it."""

    schema_version: int = PLAN_VERSION
    config: JobConfig | None = None  # None: settings of the built-in job
    trl: dict[str, Any] | None = None  # settings for TRL's parser, if TRL's SFTTrainer runs the job (finetune.sft_trl)
    layout: Layout | None = None
    forecast: RunForecast = field(default_factory=RunForecast)
    environment: dict[str, str] = field(default_factory=dict)
    transport: dict[str, str] = field(default_factory=dict)  # network, evidence, gdrdma: transport that NCCL should use
    notes: tuple[str, ...] = ()  # about the settings: older option names, options without effect


def dumps(plan: JobPlan) -> str:
    """Serialize the plan. Raises ConfigError if a job would reject it."""
    text = json.dumps(plain.write(plan), indent=1) + "\n"
    try:
        plain.loads(text.encode())
    except ValueError as error:
        raise ConfigError(f"the plan: {error}") from None
    return text


def read(path: Path, overrides: Sequence[str] = ()) -> JobPlan:
    """Read plan.json and apply `key=value` overrides to its settings. Raises ConfigError, which names the file."""
    try:
        data = plain.loads(bounded.read(path, MAX_FILE_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan {path}: {error}") from None
    members = {one.name for one in dataclasses.fields(JobPlan)}
    if not isinstance(data, dict) or not members & set(data):
        raise ConfigError(f"plan {path}: must hold a mapping of {', '.join(sorted(members))}")
    for name in data:
        if name not in members:
            raise ConfigError(f"plan {path}: unknown {name!r}{trl.hint(str(name), members)}")
    if data.get("schema_version", PLAN_VERSION) != PLAN_VERSION:
        raise ConfigError(f"plan {path}: schema_version={data['schema_version']!r}: this release reads {PLAN_VERSION}")
    for name in ("config", "trl", "layout", "forecast", "environment", "transport"):
        if not isinstance(data.get(name), dict | None):
            raise ConfigError(f"plan {path}: {name}: must be a mapping")
    settings = data.get("config")
    raw = with_overrides(dict(settings) if settings is not None else read_mapping(DEFAULT_CONFIG), overrides)
    config, _, notes = parse_config(raw, None if data.get("trl") is None else {})
    try:
        forecast = plain.read(data.get("forecast") or {}, RunForecast)
    except plain.MisfitError as error:
        raise ConfigError(f"plan {path}: forecast: {error}") from None
    layout, plan_notes = data.get("layout"), data.get("notes") or []
    return JobPlan(
        config=config,
        trl=None if data.get("trl") is None else trl.trl_settings(with_overrides(dict(data["trl"]), overrides), {}),
        layout=None if layout is None else parse_layout(layout, f"plan {path}: layout"),
        forecast=forecast,
        environment={str(name): str(value) for name, value in (data.get("environment") or {}).items()},
        transport={str(name): str(value) for name, value in (data.get("transport") or {}).items()},
        notes=tuple(dict.fromkeys([*(str(text) for text in plan_notes), *notes])),
    )


def choose(plan: Path | None, config: Path | None, overrides: Sequence[str] = ()) -> tuple[JobPlan, JobConfig]:
    """Return the plan and its settings, read from plan.json or created from a settings file. Raises ConfigError."""
    if plan is None:
        made, _, notes = read_config(config, overrides)
        return JobPlan(config=made, notes=tuple(notes)), made
    if config is not None:
        raise ConfigError(f"--config {config}: the plan holds the settings; use only one of --plan and --config")
    found = read(plan, overrides)
    return found, found.config or JobConfig()


def parse_layout(raw: Mapping[str, Any], where: str) -> Layout:
    """Convert a mapping to a Layout. An unknown field is an error, which suggests similar field names."""
    known = [one.name for one in dataclasses.fields(Layout)]
    for name in raw:
        if name not in known:
            raise ConfigError(f"{where}: unknown {name!r}{trl.hint(str(name), known)}")
    try:
        return Layout(**{**raw, "stage_layers": tuple(raw.get("stage_layers") or ())})
    except (LayoutError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None
