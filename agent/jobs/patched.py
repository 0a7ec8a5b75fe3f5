"""What a verdict's causes ask of the manifest that was given, as a patch of the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.advice.advise import Request, advise
from agent.base import units
from agent.base.documents import difference
from agent.base.hosts import snapshots
from agent.base.inputs import InputError
from agent.checks.lint import lint_text
from agent.checks.verdict import Check
from agent.jobs.wrapped import advised as advice_for
from contracts.yaml_edit import EditError, documents
from contracts.yaml_text import YamlTextError
from planner.advice import Reason, Setting
from planner.forecast.machines import names
from planner.kubernetes.manifests import mappings
from planner.kubernetes.wrap import Additions, WrapError, jobs_in, wrap
from planner.lint.change import Change, ChangeError, changed, parse_remedy
from planner.lint.sources import read_text
from planner.why import Patch

_MOST_CHANGES = 16
_MOST_READ = 128 << 10  # characters: the text is read anew for each change, at some 10 s for all of them


def patched(text: str, path: Path, wrong: Sequence[Check], advised: Mapping[str, str]) -> Patch:
    """The file without what is wrong in it: each change is kept where its finding is gone by it and no other comes."""

    def judged(made: str) -> set[tuple[str, str, str]]:
        try:
            checks = lint_text(made, "auto", nccl_version=None, snapshot=None, name=path.name).checks
        except InputError:  # no variable is left
            return set()
        return {(one.id, one.subject, one.node) for one in checks if one.status in ("fail", "warn")}

    made = text
    settings: list[str] = []
    left: list[str] = []
    most = min(_MOST_CHANGES, max(1, _MOST_READ // max(1, len(text))))
    standing, tries = judged(made), 0
    for number, check in enumerate(wrong):
        if tries == most or len(left) == _MOST_CHANGES:
            left.append(f"{len(wrong) - number} findings more: give the patched file again")
            break
        change = parse_remedy(
            check.subject, check.evidence[0].partition("=")[2] if check.evidence else "", check.remedy
        )
        here = (check.id, check.subject, check.node)
        if here not in standing:  # gone with another
            continue
        if change is None:
            left.append(f"{check.node}: {check.subject}: {check.remedy}")
            continue
        tries += 1
        try:
            tried = changed(made, path.name, change, check.node)
        except ChangeError as error:
            left.append(f"{check.node}: {change.words}: {error}")
            continue
        after = judged(tried)
        if here in after or after - standing:
            left.append(f"{check.node}: {change.words}: would be wrong otherwise; {check.remedy}")
            continue
        made, standing = tried, after
        settings.append(f"{check.node}: {change.words}")
    for name, value in advised.items() if "apiVersion" in text else ():
        tried, said, kept = _advised(made, path.name, name, value)
        if judged(tried) - standing:
            kept, tried, said = [f"{name}={value}: would be wrong here, by lint-env"], made, []
        made, settings, left = tried, [*settings, *said], [*left, *kept]
    diff = difference(text, made, str(path), str(path))
    return Patch(file=str(path), diff=diff, settings=tuple(settings), left=tuple(left))


def _advised(text: str, file: str, name: str, value: str) -> tuple[str, list[str], list[str]]:
    """(The text in which each job's container has the setting, each change in words, what could not be changed)."""
    said, left = [], []
    for each in read_text(text, None, file).environments:
        was = each.environment.get(name, value)
        if was != value and name in each.names:
            change = Change(name=name, was=was, to=value)
            try:
                text = changed(text, file, change, each.source)
                said.append(f"{each.source}: {change.words}")
            except ChangeError as error:
                left.append(f"{each.source}: {change.words}: {error}")
    reason = Reason(rule="why", evidence="the log's transport is sockets, and the nodes have RDMA", source="why")
    setting = Setting(name=name, value=value, reason=reason)
    try:
        added = [None if job.without_gpus else Additions(settings=(setting,)) for job in jobs_in(documents(text))]
        made, notes = wrap(text, added)
    except (WrapError, EditError, YamlTextError) as error:
        return text, said, [*left, f"{name}={value}: {error}"]
    said += [f"add {name}={value}"] if made != text else []
    left += [f"{name}={value}: no job of it asks for GPUs"] if not any(added) else []
    return made, said, [*left, *(note for note in notes if name in note)]


_INSTANCE = "node.kubernetes.io/instance-type"  # kubernetes.io/docs/reference/labels-annotations-taints


def placed(text: str, request: Request) -> Request:
    """The question with the machine that the manifest asks for by its instance type, and its nodes, where not given."""
    if "apiVersion" not in text or ((request.hosts or request.machine) and request.nodes):
        return request
    with suppress(WrapError, YamlTextError):
        found = documents(text)
        if not request.hosts and request.machine is None:
            known = (name for word in _values(found, _INSTANCE) if (name := word.removeprefix("Standard_")) in names())
            request = replace(request, machine=next(known, None))
        if request.machine and request.nodes is None:
            request = replace(request, nodes=jobs_in(found)[0].nodes)
    return request


def _values(document: Any, label: str) -> Iterator[str]:
    """Values of a label in selectors: `label: value`, and `key: label, values: [value]`."""
    for found in mappings(document):
        if isinstance(found.get(label), str):
            yield found[label]
        if found.get("key") == label and isinstance(found.get("values"), list):
            yield from (one for one in found["values"] if isinstance(one, str))


def forecast_after(text: str, file: str, request: Request) -> tuple[str, str]:
    """(What the layout of the first job's own arguments is due to take on sound nodes, the command that tells it).

    Of a job whose arguments do not tell, the best layout of the model asked for.
    """
    told, command = _by_arguments(text, file, request)
    if told or request.model is None or not (request.machine or request.hosts):
        return told, command
    advice = advise(request, lambda: snapshots(request.hosts))
    if advice.chosen is None:
        return "", "topoflight recommend: " + (advice.rejected[0].reason if advice.rejected else "no layout is allowed")
    step = units.interval(advice.chosen.forecast.step_seconds, "s")
    return f"patched, in its best layout ({advice.chosen.layout.family}) it is due {step} a step", ""


def _by_arguments(text: str, file: str, request: Request) -> tuple[str, str]:
    command = f"topoflight why --manifest {file} --machine NAME, or --host FILE"
    if "apiVersion" not in text:
        return "", "topoflight recommend --model NAME --machine NAME --nodes N"
    if not request.allow_files or not (request.machine or request.hosts):  # its arguments name files, and the hub
        return "", command
    options = {"hosts": request.hosts, "root": request.root, "machine": request.machine, "config": None}
    try:
        job = jobs_in(documents(text))[0]
        advice, said = advice_for(job, () if request.machine else snapshots(request.hosts), options)
    except (WrapError, YamlTextError, InputError) as error:
        return "", f"topoflight recommend: {error}"
    if advice.chosen is None:
        return "", f"topoflight recommend; {next((line for line in said if 'unknown' in line), 'no layout is allowed')}"
    step = units.interval(advice.chosen.forecast.step_seconds, "s")
    return f"patched, {job.kind}/{job.name} is due {step} a step", ""
