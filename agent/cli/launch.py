"""The verbs launch, run and wrap: start the fine-tune on this host or a cluster, or a user's own command or job."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agent.base import EXIT_FAILED, EXIT_PASS, raise_as
from agent.base.options import InputError, NothingFitsError, command, describe_source, read_input, require_writable
from agent.base.output import Progress, console, print_notes, print_text, render, write_result
from agent.base.units import count
from contracts import plain

if TYPE_CHECKING:
    from agent.jobs.launch import FinishedJob, LaunchOptions
    from contracts.finding import Finding
    from contracts.job_config import JobPlan
    from contracts.run_record import RunRecord
    from planner.advice import Recommendation
    from planner.kubernetes.manifests import Document
    from probes.api import Snapshot

_MANIFEST_BYTES = 1 << 20


@command("launch")
@click.argument("arguments", nargs=-1, metavar="[-- ARGS...]")
def launch(script: Path | None, arguments: tuple[str, ...], trainer: str, **values: Any) -> None:
    """Choose the layout, then launch on this host, on Slurm or on a Kubernetes cluster."""
    from agent.advice.advise import with_fsdp
    from agent.advice.job_plan import choose_trainer, describe_refusal, read_explicit_settings
    from agent.jobs.launch import LaunchOptions
    from agent.terminal.advice import list_layout_properties, print_rejected
    from planner.recommend import ROWS

    options = LaunchOptions.of(**values)
    if options.api == "slurm" and options.form == "json":
        raise click.UsageError("-o=json and --api=slurm cannot be combined: a batch script has no JSON form.")
    if script is not None:
        _launch_script(script, arguments, options)
        return
    if arguments:
        raise click.UsageError(f"{arguments[0]!r}: arguments after -- require --script")
    snapshots = options.request.read_hosts()
    request = replace(options.request, nodes=options.nodes or max(1, len(options.request.hosts)))
    advice, reason = choose_trainer(request, trainer, snapshots)
    advice = with_fsdp(advice)
    print_notes(line for line in advice.unknowns if line.startswith(ROWS))
    if advice.chosen is None:
        print_rejected(console(), advice)
        raise NothingFitsError("; ".join(filter(None, (describe_refusal(advice), reason))))
    if reason:
        print_text(reason, err=True)
    if not options.over and advice.total_seconds is not None:  # its duration is known
        for word, line in list_layout_properties(advice, advice.chosen)[:2]:
            print_text(f"forecast {word}: {line}", err=True)
    folder = options.folder or Path(read_explicit_settings(advice, request).get("output_dir", "finetune-output"))
    if options.api == "slurm":
        _submit_script(advice, snapshots, folder, options)
    elif options.api != "local":
        _launch_on_cluster(advice, snapshots, options)
    else:
        _launch_here(advice, snapshots, folder, replace(options, request=request))


def _launch_on_cluster(advice: Recommendation, snapshots: Sequence[Snapshot], options: LaunchOptions) -> None:
    """Create the job, or print it with --dry-run."""
    from agent.advice.advise import adapt_to_pods
    from agent.advice.job_plan import describe_grace
    from agent.jobs import cluster_job
    from planner.kubernetes import networks
    from planner.kubernetes.manifests import SAVE_SECONDS, render as render_documents

    cluster_job.refuse_untrainable(advice, options)
    # without --host this machine was scanned: a pod of the node, or the administrator's machine
    advice, left_out = adapt_to_pods(advice, snapshots, here=not options.request.hosts and not options.request.machine)
    advice = cluster_job.add_rails(advice, options, snapshots)
    if options.no_compute_domain:
        advice = cluster_job.without_compute_domain(advice)
    spec = cluster_job.build_spec(advice, options)
    plan = cluster_job.build_plan(advice, options, snapshots)
    job_documents = cluster_job.build_documents(spec, options.api, plan)
    documents = (*cluster_job.build_claim(options), *job_documents)
    if options.with_network:
        network = networks.from_snapshots(snapshots, namespace=spec.namespace, host_mofed=options.host_mofed)
        documents = (*networks.network(network), *documents)
    of_network = cluster_job.list_network_warnings(snapshots, options.host_mofed) if options.with_network else ()
    notice = describe_grace(advice, "the pods", spec.save_seconds, SAVE_SECONDS, options.storage_rate)
    print_notes((*plan.notes, *left_out, notice))
    print_notes((*of_network, *cluster_job.list_warnings(spec)), "warning")
    if not (options.preflight_image or options.no_preflight or options.measure):
        print_text("warning: no gate runs before this job; --preflight-image IMAGE adds it to each pod", err=True)
    if options.dry_run:
        items = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        print_text(render(items, "json") if options.form == "json" else render_documents(documents), nl=False)
    elif options.with_network:
        raise click.UsageError("--network: an administrator has to apply these resources; add --dry-run to print them")
    else:
        _create_objects(documents, options.context)


def _create_objects(documents: Sequence[Document], context: str | None) -> None:
    """Create the job's objects through the API server, and print what was created, and the server's warnings once."""
    from agent.cluster.client import connect
    from agent.jobs import cluster_job

    warned: dict[str, None] = {}  # from the dry run and again from the creation
    client = connect(context, on_warning=lambda text: warned.setdefault(text))
    try:
        for line in cluster_job.create(client, documents):
            print_text(line)
    finally:
        print_notes(warned, "warning: the API server says")


def _submit_script(advice: Recommendation, snapshots: Sequence[Snapshot], folder: Path, options: LaunchOptions) -> None:
    """Submit the batch script, or print it with --dry-run."""
    from agent.jobs import slurm

    folder = folder.absolute()
    script, notes = slurm.build_script(advice, snapshots, folder, options)
    if options.dry_run:
        print_text(script, nl=False)
        if not folder.is_dir():
            notes.append(f"the folder {folder} must exist before the script is submitted")
    print_notes(notes)
    if options.dry_run:
        return
    require_writable("--output", folder, folder=True)
    job_id = slurm.submit(script, folder)
    print_text(f"job {job_id} submitted: {folder / 'job.sbatch'}")
    print_text(f"its log: {folder}/slurm-{job_id}.log; diagnose it: topoflight why --job {job_id}", err=True)


def _print_plan(plan: JobPlan, command: Sequence[str], notes: Iterable[str], form: str) -> None:
    """Print the plan and the command of a job, instead of starting it."""
    print_notes(notes)
    print_text(render(plain.write(plan), form), nl=False)
    print_text("# " + shlex.join(command), err=form == "json")  # JSON has no comments


def _pass_gate(
    snapshots: Sequence[Snapshot], options: LaunchOptions, settings: dict[str, str], ranks: int, progress: Progress
) -> None:
    """Check this host with the job's settings before it starts; with --measure also benchmark it, for a few seconds.

    Exits if a check fails.
    """
    from agent.checks.measured import require_measured, with_bench
    from agent.checks.view import build_view, with_environment
    from agent.jobs.benchmark import build_preflight_spec, measure, stop_on_signals

    if options.no_preflight:
        return
    progress.step("preflight: checking this host")
    view = build_view([with_environment(snapshot, settings) for snapshot in snapshots])
    _require_pass(view.checks, options.require)
    if options.measure:
        with stop_on_signals(signal.SIGTERM) as (stop, _):
            spec = build_preflight_spec(snapshots[:1], ranks, quick=True)
            result = measure(replace(spec, environment=settings), progress, stop)
        checks = with_bench(view, result).checks
        checks = checks if result.stopped_by else tuple(require_measured(checks))
        _require_pass(checks, options.require, result.stopped_by or "")


def _require_pass(checks: Iterable[Finding], require: Sequence[str], stopped: str = "") -> None:
    """Exit if these checks do not pass. A required check that is unknown stops the job."""
    from agent.checks.host_checks import ALL_CODES
    from agent.checks.verdict import judge, select

    checks = select(checks, require=require, codes=ALL_CODES)
    verdict = judge(checks, stopped=stopped)
    if verdict.exit_code == EXIT_PASS:
        return
    for check in checks:
        if check.status == "fail" or (check.required and check.status == "unknown"):
            line = f"{check.status} {check.code} {check.subject}: {check.message} {check.remedy}"
            print_text(line.rstrip(), err=True)
    print_text(f"not launched: {verdict.why}; --no-preflight launches anyway", err=True)
    sys.exit(verdict.exit_code)


def _launch_script(script: Path, arguments: Sequence[str], options: LaunchOptions) -> None:
    """Run the user's trainer on this host: the gate, torchrun with the recommended environment, and the run record."""
    from agent.jobs import script as trainer
    from agent.terminal import measured
    from contracts.bounded import open_regular

    with raise_as(InputError, OSError, f"--script {script}: "):
        open_regular(script).close()
    folder, snapshots = options.folder or Path("script-output"), options.request.read_hosts()
    plan = trainer.build_plan(script, arguments, snapshots, options, folder)
    if options.dry_run:
        _print_plan(plan.document, plan.words, plan.notes, options.form)
        return
    print_notes(plan.notes)
    record = _run_here(
        snapshots, options, folder, plan.document.environment, plan.ranks,
        f"{script.name} on {count(plan.ranks, 'rank')}", lambda add: trainer.train(plan, folder, options.timeout, add),
    )  # fmt: skip
    measured.print_comparison(console(), record)
    print_text(f"record: {folder / 'run.json'}", err=True)


def _launch_here(advice: Recommendation, snapshots: Sequence[Snapshot], folder: Path, options: LaunchOptions) -> None:
    """Run the job, or print its plan with --dry-run, which may be for several nodes."""
    from agent.advice.job_plan import GRACE_SECONDS, build_job_plan, describe_grace, estimate_grace, require_layout
    from agent.jobs import launch as launcher
    from agent.terminal import measured

    layout = require_layout(advice).layout
    plan = build_job_plan(advice, options.request.with_settings(f"output_dir={folder}"))
    if options.dry_run:
        command = launcher.build_command(folder / "plan.json", layout.world_size, options.request.nodes or 1)
        _print_plan(plan, command, plan.notes, options.form)
        return
    seconds = estimate_grace(advice, options.storage_rate)
    print_notes([describe_grace(advice, "the ranks", seconds, GRACE_SECONDS, options.storage_rate)])
    record = _run_here(
        snapshots, options, folder, plan.environment, layout.world_size, layout.family,
        lambda note: launcher.train(plan, folder, timeout_seconds=options.timeout, grace_seconds=seconds, on_line=note),
    )  # fmt: skip
    measured.print_run(console(), record)
    measured.print_comparison(console(), record)


def _run_here(
    snapshots: Sequence[Snapshot], options: LaunchOptions, folder: Path, settings: dict[str, str], ranks: int,
    title: str, train: Callable[[Callable[[str], None]], FinishedJob],
) -> RunRecord:  # fmt: skip
    """Check this host, run the job on it, and return its stored record.

    Exits if the check failed, or if the job failed, after printing how it ended.
    """
    from agent.base.result_store import store_run
    from contracts.run_record import RESUMABLE

    require_writable("--output", folder, folder=True)
    progress = Progress()
    _pass_gate(snapshots, options, settings, ranks, progress)
    progress.step(f"launch: {title}")
    done = train(progress.note)
    if done.record is not None:
        store_run(done.record)
        if done.exit_code == 0:
            return done.record
    print_text("\n".join(done.last_lines), err=True)
    print_text(f"{done.ending} (whole log: {done.output})", err=True)
    sys.exit(RESUMABLE if done.exit_code == RESUMABLE else EXIT_FAILED)


# A user's own training command, and a user's own job for a cluster.


@command("run", context_settings={"allow_interspersed_args": False})
@click.argument("command", metavar="COMMAND...", nargs=-1, required=True)
def run(command: tuple[str, ...], folder: Path) -> None:
    """Replace this process by the command, in an environment that starts the rank monitor."""
    from agent.jobs.script import add_monitor

    with raise_as(click.UsageError, OSError, f"COMMAND {command[0]} cannot be started: "):
        os.execvpe(command[0], command, add_monitor(os.environ, folder))  # noqa: S606 - the user's own command


@command("wrap")
@click.argument("source", metavar="FILE|-")
def wrap(
    source: str, output: Path | None, in_place: bool, hosts: tuple[Path, ...], root: str, machine: str | None,
    config: Path | None, monitor: bool, **options: Any,
) -> None:  # fmt: skip
    """Read the file, print the changes, and write them if requested."""
    from agent.advice.request import Request
    from agent.jobs.script import wrap_manifest
    from agent.jobs.slurm import LIKE_THIS_HOST, add_to_script

    if in_place and source == "-":
        raise click.UsageError("--apply writes over FILE and cannot be used with standard input.")
    raw = read_input(source, _MANIFEST_BYTES, hint="; give the job's manifest alone")
    with raise_as(InputError, UnicodeDecodeError, f"{describe_source(source)}: not UTF-8: "):
        text = raw.decode()
    request = Request(hosts=hosts, root=root, machine=machine, config=config)
    is_script = re.search(r"\A#!|^#SBATCH\b", text, re.MULTILINE) or source.endswith((".sbatch", ".slurm", ".sh"))
    options |= {} if is_script else {"monitor": monitor}  # a script always has the monitor
    wrapped, notes = (add_to_script if is_script else wrap_manifest)(text, request.read_hosts(), request, **options)
    print_text(_make_diff(text, wrapped, source, str(output or source)), nl=False)
    print_notes(notes if hosts or machine else [*notes, LIKE_THIS_HOST])
    if wrapped == text:
        print_text("nothing to add", err=True)
    for path in filter(None, (output, Path(source) if in_place and wrapped != text else None)):
        write_result(path, wrapped)


def _make_diff(before: str, after: str, source: str, target: str) -> str:
    """Return a unified diff for patch(1) and `git apply -p0`; empty if the texts are equal."""
    old, new = (re.findall(r"[^\n]*\n|[^\n]+\Z", text) for text in (before, after))
    import difflib

    rows = difflib.unified_diff(old, new, source, target)
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)
