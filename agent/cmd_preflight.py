"""The verbs preflight and launch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from agent import pages, terminal
from agent.advise import Request
from agent.exits import EXIT_FAILED, EXIT_PASS
from agent.gate import GateError
from agent.hosts import host_option, root_option
from agent.output import Progress, console, render, waiting
from agent.report import Report, junit, write_atomic, write_folder
from planner.advice import Recommendation
from probes.api import Snapshot

FORMATS = ("table", "json", "yaml", "junit", "github", "markdown")

model_options = (
    click.option("--model", default=None, help="Known model name or config.json; default with --fly: a tiny Llama."),
    click.option("--method", default="lora", type=click.Choice(["full", "lora", "qlora"]), show_default=True),
    click.option("--sequence-length", default=None, type=click.IntRange(1, 10_000_000)),
    click.option("--global-batch", default=None, type=click.IntRange(1, 10_000_000)),
    click.option("--ranks", default=None, type=click.IntRange(1, 1024), help="Default: one per GPU, 2 without GPUs."),
    click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The job's YAML."),
    click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a line of the job's YAML."),
)


def with_model_options(command: Any) -> Any:
    """Add the options that name model and run."""
    for option in reversed(model_options):
        command = option(command)
    return command


@click.command()
@host_option
@root_option
@click.option(
    "--fly", is_flag=True, help="Measure, then launch a small fine-tune as recommended, and compare. Makes load."
)
@click.option("--measure", is_flag=True, help="Measure collectives with real ranks. Makes load.")
@with_model_options
@click.option(
    "--require", multiple=True, metavar="CHECK", help="A check that must be measured: rdma.*; else exit code 5."
)
@click.option("--skip", multiple=True, metavar="CHECK", help="A check to leave out.")
@click.option("--fail-on", default="fail", type=click.Choice(["fail", "warn", "unknown"]), show_default=True)
@click.option(
    "--timeout", default=600.0, show_default=True, type=click.FloatRange(1, 86400), help="Seconds for the job."
)
@click.option("--report", "folder", default=None, type=click.Path(file_okay=False, path_type=Path),
              help="Folder for report.{json,html,md} and junit.xml. Default with --fly: reports/.")  # fmt: skip
@click.option("-o", "--output", "forms", multiple=True, metavar="FORMAT[=FILE]",
              help="table, json, yaml, junit, github or markdown; repeat for several.")  # fmt: skip
@click.option("--baseline", default=None, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="A report.json or recording of a good state: only what got worse fails.")  # fmt: skip
@click.option("--flights", multiple=True, type=click.Path(exists=True, path_type=Path), metavar="PATH",
              help="Earlier flights (flight.json or folders of them): step times by network, compared.")  # fmt: skip
@click.option("--nodes", default=None, metavar="NAME,...", help="Judge these nodes by what their agents publish.")
@click.option("--selector", default=None, metavar="LABELS", help="Judge the cluster's nodes with these labels.")
@click.option("--context", default=None, help="With --nodes or --selector: the kubeconfig's context.")
@click.option("--list-checks", is_flag=True, help="Name every check and stop.")
@click.option("--all", "everything", is_flag=True, help="Show passed and unknown checks too.")
@click.option("--force", is_flag=True, help="Measure although GPUs are in use by others.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def preflight(list_checks: bool, forms: tuple[str, ...], everything: bool, quiet: bool, **given: Any) -> None:
    """Run the gate: 0 pass, 1 tool error, 2 usage, 3 failed check, 4 warnings with --fail-on warn, 5 unknown."""
    if list_checks:
        from agent.codes import ALL_CODES

        click.echo("\n".join(ALL_CODES))
        return
    targets = [_target(form) for form in forms] or [("table", None)]
    from agent.preflight import run

    folder: Path | None = given.pop("folder") or (Path("reports") if given["fly"] else None)
    where = {name: given.pop(name) for name in ("nodes", "selector", "context")}
    try:
        if where["nodes"] or where["selector"]:
            report = _of_cluster(where, given)
        else:
            report = run(_options(given, folder), Progress(quiet=quiet))
    except GateError as error:
        raise click.UsageError(str(error)) from None
    for form, path in targets:
        _write(report, form, path, everything)
    if folder is not None:
        try:
            written = write_folder(report, folder, pages.report_page(report), pages.report_markdown(report))
        except OSError as error:
            raise click.ClickException(f"--report {folder}: {error.strerror or error}") from None
        click.echo(f"report: {', '.join(map(str, written))}; exit code {report.verdict.exit_code}", err=True)
    sys.exit(report.verdict.exit_code)


def _of_cluster(where: dict[str, Any], given: dict[str, Any]) -> Report:
    """The gate over other nodes; reads what they publish, and makes no load."""
    from agent.cluster_gate import checks_of, fleet, named, records_of
    from agent.kube import ApiError, Client
    from agent.kube_access import AccessError, find
    from agent.preflight import report_of

    wrong = [name for name in ("fly", "measure", "hosts") if given[name]]
    if wrong:
        raise click.UsageError(f"--nodes and --selector judge other nodes: they do not go with --{wrong[0]}")
    try:
        with waiting("preflight: asking the cluster"):
            client = Client(find(where["context"]))
            names = named(client, [n for n in (where["nodes"] or "").split(",") if n], where["selector"])
            held = fleet(client)
    except (AccessError, ApiError) as error:
        raise click.ClickException(str(error)) from None
    return report_of(
        checks_of(names, held), nodes=records_of(names, held), require=given["require"], skip=given["skip"],
        fail_on=given["fail_on"], baseline=given["baseline"],
    )  # fmt: skip


def _options(given: dict[str, Any], folder: Path | None) -> Any:
    from agent.preflight import Options

    request = Request(
        hosts=given["hosts"], root=given["root"], model=given.pop("model"), method=given.pop("method"),
        sequence_length=given.pop("sequence_length") or 2048, global_batch=given.pop("global_batch"),
    )  # fmt: skip
    timeout = given.pop("timeout")
    return Options(request=request, timeout_seconds=timeout, output=folder or Path("reports"), **given)


def _target(form: str) -> tuple[str, Path | None]:
    name, _, file = form.partition("=")
    if name not in FORMATS:
        raise click.UsageError(f"-o {form}: the format must be one of {', '.join(FORMATS)}")
    return name, Path(file) if file else None


def _write(report: Report, form: str, path: Path | None, everything: bool) -> None:
    if form == "table" and path is None:
        terminal.report(console(), report, everything=everything)
        return
    text = {
        "json": lambda: render(report, "json"),
        "yaml": lambda: render(report, "yaml"),
        "junit": lambda: junit(report),
        "github": lambda: github(report),
        "markdown": lambda: pages.report_markdown(report),
        "table": lambda: pages.report_markdown(report),
    }[form]()
    if path is None:
        click.echo(text, nl=False)
        if form == "github" and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
            with Path(summary).open("a", encoding="utf-8") as stream:
                stream.write(pages.report_markdown(report))
        return
    try:
        write_atomic(path, text)
    except OSError as error:
        raise click.ClickException(f"-o {form}={path}: {error.strerror}") from None


def github(report: Report) -> str:
    """Workflow commands of GitHub Actions: an annotation per failed or warned check."""
    levels = {"fail": "error", "warn": "warning"}
    lines = []
    for check in report.checks:
        level = "error" if check.required and check.status == "unknown" else levels.get(check.status)
        if level:
            title = _escape(f"{check.id} {check.subject}".strip(), attribute=True)
            lines.append(f"::{level} title={title}::{_escape(f'{check.message} {check.remedy}'.strip())}\n")
    return "".join(lines)


def _escape(text: str, *, attribute: bool = False) -> str:
    """As the runner wants it: a line break would end the command."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if attribute else text


cluster_options = (
    click.option("--api", default="local", type=click.Choice(["local", "trainjob", "pytorchjob", "job"]),
                 show_default=True, help="Where to launch: torchrun here, or a job for the cluster."),
    click.option("--context", default=None, help="Cluster: the kubeconfig's context. Default: its current one."),
    click.option("--image", default=None, help="Cluster: the fine-tune image."),
    click.option("--name", default="topoflight-sft", show_default=True, help="Cluster: name of the job."),
    click.option("--namespace", default="default", show_default=True),
    click.option("--nodes", default=None, type=click.IntRange(1, 100_000), help="Cluster: pods, one per node."),
    click.option("--resource", "resources", multiple=True, metavar="NAME=COUNT", help="Cluster: of each pod."),
    click.option("--node-selector", multiple=True, metavar="LABEL=VALUE"),
    click.option("--tolerate", multiple=True, metavar="TAINT"),
    click.option("--claim", default=None, help="Cluster: PersistentVolumeClaim for /mnt/shared."),
    click.option("--queue", default=None, help="Cluster: Kueue queue."),
    click.option("--topology", default=None, metavar="LABEL", help="Cluster: node label all pods must share (Kueue)."),
    click.option("--service-account", default=None),
    click.option("--preflight-image", default=None, help="Cluster: run the gate in an init container of this image."),
    click.option("--require", multiple=True, metavar="CHECK", help="Cluster: check that the init container requires."),
    click.option("--dra", is_flag=True, help="Cluster: GPU and NIC from one PCIe root, by DRA."),
    click.option("--network", "with_network", is_flag=True,
                 help="Cluster: also print the operators' network resources for the probed interfaces."),
)  # fmt: skip


def with_cluster_options(command: Any) -> Any:
    """Add the options of jobs for a cluster."""
    for option in reversed(cluster_options):
        command = option(command)
    return command


@click.command()
@host_option
@root_option
@with_model_options
@with_cluster_options
@click.option("--machine", default=None, help="Cluster: a catalogue machine in place of a host.")
@click.option("--output", "folder", default=Path("finetune-output"), show_default=True,
              type=click.Path(file_okay=False, path_type=Path), help="Local: where the job writes.")  # fmt: skip
@click.option("--timeout", default=86400.0, show_default=True, type=click.FloatRange(1), help="Local: seconds.")
@click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")
def launch(folder: Path, timeout: float, dry_run: bool, **given: Any) -> None:
    """Launch the fine-tune with the recommended environment and layout, here or on a cluster.

    Exit code 0 flown or created, 3 the flight failed, 75 saved before it was done: the same command goes on from there.
    """
    from agent.advise import advise, with_fsdp
    from agent.benchmark import flight_request
    from agent.hosts import snapshots

    found = () if given["machine"] else snapshots(given["hosts"], root=given["root"])
    advice = advise(flight_request(given), lambda: found)
    if given["model"] is None:
        advice = with_fsdp(advice)
    if advice.chosen is None:
        terminal.rejected(console(), advice)
        raise click.ClickException("no layout fits: nothing to launch")
    if given["api"] == "local":
        _launch_here(advice, folder, timeout, dry_run, given)
    else:
        _launch_there(advice, found, dry_run, given)


def _launch_there(advice: Recommendation, found: Sequence[Snapshot], dry_run: bool, given: dict[str, Any]) -> None:
    from agent import cluster_job
    from planner.exports import ExportError
    from planner.job import JobError
    from planner.manifests import render as render_documents

    try:
        spec = cluster_job.spec_of(advice, given)
        documents = cluster_job.documents(advice, spec, given["api"], given["config"])
        if given["with_network"]:
            documents = (*cluster_job.network(found, spec.namespace), *documents)
    except (JobError, ExportError) as error:
        raise click.UsageError(str(error)) from None
    if dry_run:
        click.echo(render_documents(documents), nl=False)
        return
    if given["with_network"]:
        raise click.UsageError("--network: these are the administrator's to apply; add --dry-run to print them")
    from agent.kube import Client
    from agent.kube_access import AccessError, find

    try:
        for line in cluster_job.create(Client(find(given["context"])), documents):
            click.echo(line)
    except (JobError, AccessError) as error:
        raise click.ClickException(str(error)) from None


def _launch_here(advice: Recommendation, folder: Path, timeout: float, dry_run: bool, given: dict[str, Any]) -> None:
    from agent import launch as launcher
    from agent.flight import compare, parse, read
    from agent.keep import keep_flight

    assert advice.chosen is not None  # noqa: S101 - `launch` has refused otherwise
    if dry_run:
        click.echo(render(launcher.plan_document(advice), "yaml"), nl=False)
        words = launcher.command(
            folder / "plan.json", given["config"], advice.chosen.layout.world_size, given["overrides"]
        )
        click.echo("# " + " ".join(words))
        return
    progress = Progress()
    progress.step(f"launch: {advice.chosen.layout.family}")
    try:
        done = launcher.fly(
            advice, folder, config=given["config"], overrides=given["overrides"], timeout_seconds=timeout,
            on_line=progress.note,
        )  # fmt: skip
    except launcher.LaunchError as error:
        raise click.ClickException(str(error)) from None
    finally:
        progress.done()
    if done.exit_code != 0:
        click.echo("\n".join(done.last_lines), err=True)
        click.echo(f"{done.fate} (whole log: {done.output})", err=True)
        sys.exit(launcher.RESUMABLE if done.exit_code == launcher.RESUMABLE else EXIT_FAILED)
    record = read(folder / "flight.json")
    keep_flight(record)
    flown = parse(record)
    terminal.flight(console(), flown)
    terminal.comparison(console(), compare(advice.chosen.forecast, flown))
    sys.exit(EXIT_PASS)
