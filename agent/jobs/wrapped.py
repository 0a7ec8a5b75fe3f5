"""A job that is not ours, by its manifest: what is added to it, the machine that it asks for, and its forecast."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.advice.advise import POD_ROLES, advise, in_pods
from agent.advice.job_settings import planned_for, shape_of
from agent.advice.request import Request
from agent.base import units
from agent.base.inputs import InputError, RequestError
from agent.checks.lint import lint_text
from agent.checks.measured import ALL_CODES
from agent.checks.verdict import GateError, select
from contracts import bounded
from contracts.job_config import MAX_FILE_BYTES, ConfigError, JobConfig, parse_config
from contracts.yaml_text import YamlTextError
from planner.advice import Recommendation
from planner.forecast.models import ModelError
from planner.kubernetes.job import JobError, check_limit
from planner.kubernetes.wrap import Additions, Job, WrapError, asks_for_gpus, jobs_in, others_in, wrap
from planner.kubernetes.yaml_edit import EditError, documents
from planner.lint.machine import machine_of
from planner.stacks.arguments import CommandSettings, as_run, read_command
from probes.api import Snapshot
from probes.interfaces.facts import InterfacesFacts

_MPIRUN = re.compile(r"\b(mpirun|mpiexec|sshd)\b")
_RENDERED = "; a template is wrapped as it is rendered: helm template CHART | topoflight wrap -"


def wrapped(text: str, found: Sequence[Snapshot], options: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The manifest with what its jobs lack on these hosts, and notes. Raises InputError."""
    if options["monitor"] and not options["preflight_image"]:
        raise InputError(
            "--monitor requires --preflight-image for a manifest: the monitor's files come from that image"
        )
    try:
        resources = dict(_resource(word) for word in options["resources"])
        select((), require=options["require"], known=ALL_CODES)
        notes: list[str] = []
        additions: list[Additions | None] = []
        manifest = documents(text)
        jobs = jobs_in(manifest)
        for job in jobs:
            if job.without_gpus and not asks_for_gpus(resources):
                notes.append(
                    f"{job.kind}/{job.name}: its pods ask for no GPU: left alone; --resource NAME=COUNT adds one"
                )
                additions.append(None)
                continue
            advice, said = advised(job, found, options)
            advice, left_out = in_pods(advice, found, here=not options["hosts"] and not options["machine"])
            if any(_MPIRUN.search(word) for word in job.command):
                said.append("ranks that mpirun starts on other nodes get of the environment only what its -x names")
            notes += [*left_out, *(f"{job.kind}/{job.name}: {line}" for line in said)]
            additions.append(Additions(
                settings=advice.settings, needs=advice.needs, resources=resources, require=tuple(options["require"]),
                gate_image=options["preflight_image"], log=advice.backend == "nccl", monitor=options["monitor"],
                annotations=forecast(advice),
            ))  # fmt: skip
        made, kept = wrap(text, additions)
        notes += [*others_in(manifest), *_judged(text, jobs, found)]
    except (WrapError, EditError, YamlTextError, JobError, GateError) as error:
        template = isinstance(error, YamlTextError) and "{{" in text
        raise InputError(f"{error}{_RENDERED if template else ''}") from None
    except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
        # the manifest is a user's, in any shape that YAML has: a member of another kind than its API knows
        raise InputError(f"the manifest is not built as its kind is: {type(error).__name__}: {error}; "
                         "`kubectl apply --dry-run=server` names the member") from None  # fmt: skip
    return made, list(dict.fromkeys([*notes, *kept]))


def _judged(text: str, jobs: Sequence[Job], found: Sequence[Snapshot]) -> list[str]:
    """What lint-env says of the environment that the manifest has, on these hosts where they are one.

    Of interfaces only where the recording is of the network that the pods will have: their own, or their node's.
    """
    facts = [each for snapshot in found if (each := snapshot.facts(InterfacesFacts))]
    of_pod = any(link.role in POD_ROLES - {"loopback"} for each in facts for link in each.interfaces)
    other_network = any(part.host_network is of_pod for job in jobs for part in job.parts)
    try:
        machine = machine_of(found[0]) if len(found) == 1 else None
        checks = lint_text(text, "auto", nccl_version=None, machine=machine).checks
    except InputError:  # it sets no variable of NCCL's
        return []
    return [
        f"{check.status} {check.code} {check.subject}: {check.message} {check.remedy}".rstrip()
        for check in checks
        if check.status in ("fail", "warn") and not (other_network and check.code.startswith("env.interface."))
    ]


def _resource(word: str) -> tuple[str, str]:
    name, equals, count = word.partition("=")
    if not equals:
        raise JobError(f"--resource {word!r}: must be NAME=COUNT")
    check_limit(name, count)
    return name, count


def advised(job: Job, found: Sequence[Snapshot], options: Mapping[str, Any]) -> tuple[Recommendation, list[str]]:
    """The advice for the job's nodes, and what was read of its command, or is unknown."""

    def file(name: str) -> str | None:
        if name in job.files:
            return job.files[name]
        here = options["config"]
        return bounded.read_text(here, MAX_FILE_BYTES) if here is not None and here.name == Path(name).name else None

    said = read_command(job.command, file)
    nodes, ranks = job.nodes or said.nodes, job.ranks_per_node or said.ranks_per_node
    request = Request(hosts=options["hosts"], root=options["root"], machine=options["machine"], nodes=nodes,
                      ranks_per_node=ranks)  # fmt: skip
    if nodes is None or ranks is None:
        said.unknown.append("how many ranks it has: no replicas, nprocPerNode, GPUs or launcher's options say")
    return forecast_of(said, request, found)


def forecast_of(said: CommandSettings, request: Request, found: Sequence[Snapshot]) -> tuple[Recommendation, list[str]]:
    """The advice with the forecast of the trainer's own layout, where all of it could be read; and why not."""
    advice, unknown = None, [f"forecast: unknown: {text}" for text in said.unknown]
    if not unknown and "model_name_or_path" not in said.settings:
        unknown = ["forecast: unknown: the arguments name no model_name_or_path"]
    if not unknown:
        try:
            config, settings, _ = parse_config(as_run(said))
            advice = advise(_question(request, config, settings), lambda: found)
            if advice.chosen is None:
                why = advice.rejected[0].reason if advice.rejected else "no layout is allowed"
                unknown = [f"the layout of its arguments does not run: {why}"]
        except (ConfigError, ModelError, RequestError) as error:
            unknown = [f"forecast: unknown: {error}"]
    try:
        alone = advice or advise(request, lambda: found)
    except RequestError as error:
        raise InputError(str(error)) from None
    words = [f"forecast {line}" for line in forecast(alone).values()]
    words += [f"forecast: {text}" for text in alone.unknowns if alone.chosen]
    return alone, [*unknown, *words, *said.notes]


def _question(request: Request, config: JobConfig, settings: dict[str, Any]) -> Request:
    name = str(settings["model_name_or_path"])
    named = request.changed(model=name, engine="trl", shape=shape_of(name, config.model_revision))
    return planned_for(named, config, settings)


def forecast(advice: Recommendation) -> dict[str, str]:
    """Annotations: what the run is to be held against."""
    if advice.chosen is None:
        return {}
    due = advice.chosen.forecast
    return {
        "forecast-layout": advice.chosen.layout.family,
        "forecast-step": f"step {units.interval(due.step_seconds, 's')}",
        "forecast-memory": f"memory {units.interval(due.memory_bytes, 'B')} per rank",
    }
