"""The job plan: the document that the launcher writes, every rank reads, and the run record contains.

plan.json holds the settings, as given by a file or by the planner, the layout, its forecast, the environment, and the
transport that NCCL should use between hosts. The ConfigMap and `plan` in run.json hold the same document.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
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
    parse_layout,
    read_config,
    read_mapping,
    with_overrides,
)
from contracts.layout import Layout

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecast:
    """Forecast of the run. None means not forecast."""

    step_seconds: Interval | None = None
    memory_bytes: Interval | None = None


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
    members = [one.name for one in dataclasses.fields(JobPlan)]
    try:
        data = plain.loads(bounded.read(path, MAX_FILE_BYTES))
        if not isinstance(data, dict) or not members & data.keys():
            raise ConfigError(f"must hold a mapping of {', '.join(members)}")
        if unknown := data.keys() - members:
            raise ConfigError(f"unknown {min(unknown)!r}{trl.hint(min(unknown), members)}")
        settings, of_trl, layout = (data.pop(name, None) for name in ("config", "trl", "layout"))
        for name, value in (("config", settings), ("trl", of_trl)):
            if not isinstance(value, dict | None):
                raise ConfigError(f"{name}: must be a mapping")
        plan = plain.read({name: value for name, value in data.items() if value is not None}, JobPlan)
        if plan.schema_version != PLAN_VERSION:
            raise ConfigError(f"schema_version={plan.schema_version!r}: this release reads {PLAN_VERSION}")
        raw = with_overrides(read_mapping(DEFAULT_CONFIG) if settings is None else settings, overrides)
        config, _, notes = parse_config(raw, None if of_trl is None else {})
        return dataclasses.replace(
            plan,
            config=config,
            trl=None if of_trl is None else trl.trl_settings(with_overrides(of_trl, overrides), {}),
            layout=None if layout is None else parse_layout(layout, "layout"),
            notes=tuple(dict.fromkeys([*plan.notes, *notes])),
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan {path}: {error}") from None


def choose(plan: Path | None, config: Path | None, overrides: Sequence[str] = ()) -> tuple[JobPlan, JobConfig]:
    """Return the plan and its settings, read from plan.json or created from a settings file. Raises ConfigError."""
    if plan is None:
        made, _, notes = read_config(config, overrides)
        return JobPlan(config=made, notes=tuple(notes)), made
    if config is not None:
        raise ConfigError(f"--config {config}: the plan holds the settings; use only one of --plan and --config")
    found = read(plan, overrides)
    return found, found.config or JobConfig()
