"""The verb search."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click

from agent.base import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PASS, EXIT_UNKNOWN, units
from agent.base.options import with_options
from agent.base.output import console, print_text, render, write_result
from agent.base.progress import Progress


@click.command()
@with_options("search")
def search(form: str, save: Path | None, verbose: bool, **options: Any) -> None:
    """Find the bad nodes and links of a fleet. Generates load; one at a time per host.

    Run it on every node: with srun (one task per node), torchrun, a Kubernetes Indexed Job, or with --node-rank.
    Node 0 prints the result and ends with 0 if every node is good, 3 for a bad node or link, and 5 if none is bad and
    some node was not judged. The other nodes end with 0.
    """
    from agent.base.hosts import snapshots
    from agent.cli.bench import stop_on_signals
    from agent.jobs.search import findings_of, slurm_hosts, spec_of, summary
    from agent.terminal.findings import findings
    from collectives.search import run
    from probes.registry import ALL

    stop, got = stop_on_signals()
    progress = Progress()
    try:
        spec = spec_of(options, snapshots((), ALL))
        progress.step(f"search: {units.count(spec.nodes, 'node')}, up to {units.seconds(spec.limit_seconds)}")
        result = run.search(spec, progress.note, stop)
    except run.SearchError as error:
        if signal.SIGINT not in got:
            raise
        print_text(str(error), err=True)
        sys.exit(EXIT_INTERRUPTED)
    finally:
        progress.done()
    if not result:
        return
    found = findings_of(result)
    document = {**result, "findings": found, "summary": summary(result)}
    if form == "table":
        first, *rest = summary(result)
        print_text(first)
        findings(console(), found, everything=verbose)
        print_text("\n".join(rest))
    else:
        print_text(slurm_hosts(result) if form == "slurm" else render(document, form), nl=False)
    if save is not None:
        write_result(save, render(document, "json"), named=f"--save {save}")
    if any(one.status in ("fail", "warn") for one in found):
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_UNKNOWN if found else EXIT_PASS)
