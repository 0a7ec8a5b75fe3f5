"""The verb preflight: run the stages of agent.jobs.preflight, and print or write the report in each format."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agent.base import raise_as
from agent.base.options import InputError, command, require_writable
from agent.base.output import Progress, console, explain_unwritable, print_text, render, save_document, write_result
from contracts.plain import printable

if TYPE_CHECKING:
    from rich.console import Console

    from agent.jobs.preflight import Report

FORMATS = ("table", "json", "yaml", "junit", "github", "slurm", "reason")


@command("preflight")
def preflight(
    forms: tuple[str, ...], everything: bool, verbose: bool, quiet: bool, save: Path | None,
    **values: Any,
) -> None:  # fmt: skip
    """Run the checks, write the results in each form, and exit with the verdict's code."""
    targets = [_parse_target(form) for form in forms] or [("table", None)]
    from agent.jobs.preflight import REPORTS, PreflightOptions, judge_nodes, run, write_folder

    options = PreflightOptions.of(**values)
    folder = options.folder
    if folder is None and options.train:
        folder = REPORTS
        require_writable("--report", folder, folder=True)
    if options.nodes is not None or options.selector is not None:
        report = judge_nodes(options)
    else:
        report = run(options, Progress(quiet=quiet))
    for form, path in targets:
        _write(report, form, path, verbose=verbose or everything, everything=everything)
    save_document(save, report)
    if save and report.verdict.word == "fail":
        print_text(f"note: --baseline {save} will accept what failed now. Save it again after the repair.", err=True)
    if folder is not None:
        from agent.pages import render_report

        with raise_as(click.ClickException, OSError, f"--report {folder}: "):
            written = write_folder(report, folder, render_report(report))
        print_text(f"report: {', '.join(map(str, written))}; exit code {report.verdict.exit_code}", err=True)
    sys.exit(report.verdict.exit_code)


def _parse_target(form: str) -> tuple[str, Path | None]:
    name, _, file = form.partition("=")
    if name not in FORMATS:
        raise click.UsageError(f"-o {form}: the format must be one of {', '.join(FORMATS)}")
    if file and (problem := explain_unwritable(Path(file))):
        raise InputError(f"-o {form}: {problem}")
    return name, Path(file) if file else None


def _write(report: Report, form: str, path: Path | None, *, verbose: bool, everything: bool) -> None:
    from agent.base.lines import plain_console
    from agent.jobs.preflight import format_slurm_hosts, format_slurm_reasons, render_junit

    if form == "table" and path is None:
        print_report(console(), report, verbose=verbose, everything=everything)
        return
    table = io.StringIO()
    if form == "table":
        print_report(plain_console(table), report, verbose=verbose, everything=everything)
        text = table.getvalue()
    else:
        texts = {"junit": render_junit, "github": render_github, "reason": format_slurm_reasons,
                 "slurm": format_slurm_hosts}  # fmt: skip
        text = texts.get(form, lambda full: render(full, form))(report)
    if path is None:
        print_text(text, nl=False)
    else:
        write_result(path, text, label=f"-o {form}={path}")


def render_github(report: Report) -> str:
    """Return workflow commands for GitHub Actions: one annotation per failed or warned check."""
    from agent.checks.findings import group_findings
    from agent.checks.verdict import describe_unchecked_gpus

    levels = {"fail": "error", "warn": "warning"}
    aside = describe_unchecked_gpus(report.checks)
    lines = [f"::notice title=preflight::{_escape_command(aside)}\n"] if aside else []
    several_nodes = len({check.node for check in report.checks if check.node}) > 1
    for group in group_findings(report.checks):
        unmeasured = group.status == "unknown" and group.required
        for check in group.checks[:1] if unmeasured else group.checks:  # one annotation per reason
            level = "error" if unmeasured else levels.get(check.status)
            if level:
                parts = (group.title if unmeasured else check.code, check.subject, f"on {check.node}" * several_nodes)
                title = _escape_command(" ".join(filter(None, parts)), attribute=True)
                text = _escape_command(". ".join(filter(None, (check.message.rstrip("."), check.remedy))))
                lines.append(f"::{level} title={title}::{text}\n")
    return "".join(lines)


def _escape_command(text: str, *, attribute: bool = False) -> str:
    """Escape text for the runner, where a line break would end the command."""
    text = printable(text.replace("\r\n", "\n")).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if attribute else text


def print_report(out: Console, report: Report, *, verbose: bool = False, everything: bool = False) -> None:
    """Print the verdict and the remedy, then the facts behind them; `verbose` adds hosts, links and evidence."""
    from rich.markup import escape

    from agent.terminal import hosts, measured
    from agent.terminal.advice import print_recommendation
    from agent.terminal.findings import print_findings
    from agent.terminal.topology import print_node

    host = report.snapshots[0].hostname if len(report.snapshots) == 1 else ""
    hosts.print_verdict(out, report.verdict, report.checks, host=host)
    if not verbose:
        hosts.print_hosts_brief(out, report.snapshots, report.topologies, report.checks)
        kinds = [(record.name, f"{record.gpu_text}; RDMA {record.rdma_text}") for record in report.nodes]
        hosts.print_healthy_nodes(out, kinds, report.checks)
    else:
        for snapshot, topology in zip(report.snapshots, report.topologies, strict=True):
            hosts.print_host(out, snapshot)
            print_node(out, topology)
    if report.bench is not None:
        measured.print_benchmark(out, report.bench, verbose=verbose)
    if report.recommendation is not None and (verbose or report.recommendation.model is not None):
        print_recommendation(out, report.recommendation, brief=not verbose)
    if report.run is not None:
        measured.print_run(out, report.run)
        measured.print_comparison(out, report.run)
    if verbose:
        out.print("\n[bold]Findings[/bold]")
        print_findings(out, report.checks, everything=everything)
    else:
        hosts.print_findings_brief(out, report.checks)
    for note in report.notes:
        out.print(f"· {escape(note)}")
