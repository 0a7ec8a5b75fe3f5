"""The verb search."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from agent.base import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PASS, EXIT_UNKNOWN, units
from agent.base.options import command
from agent.base.output import console, print_text, render, save_document, write_result
from agent.base.progress import Progress


@command("search")
def search(form: str, save: Path | None, picture: Path | None, verbose: bool, **options: Any) -> None:
    """Take part in the search, and on node 0 print the result."""
    from agent.base import result_store
    from agent.base.hosts import snapshots
    from agent.cli.bench import stop_on_signals
    from agent.jobs import search as job
    from agent.terminal.findings import findings
    from collectives.search import run
    from contracts import plain
    from probes.registry import ALL

    stop, got = stop_on_signals()
    progress = Progress()
    try:
        spec = job.spec_of(options, snapshots((), ALL))
        progress.step(f"search: {units.count(spec.nodes, 'node')}, up to {units.seconds(spec.limit_seconds)}")
        result = run.search(spec, progress.note, stop)
    except run.SearchError as error:
        if signal.SIGINT not in got:
            raise
        print_text(str(error), err=True)
        sys.exit(EXIT_INTERRUPTED)
    finally:
        progress.done()
    if result is None:
        return
    found, lines, measured = job.findings_of(result), job.summary(result), plain.write(result)
    result_store.save_search_result(measured)
    document = {**measured, "findings": found, "summary": lines, "affinity": job.affinity(result)}
    if form == "table":
        print_text(lines[0])
        findings(console(), found, everything=verbose)
        print_text("\n".join(lines[1:]))
    else:
        print_text(job.slurm_hosts(result) if form == "slurm" else render(document, form), nl=False)
    save_document(save, document)
    if picture is not None:
        write_result(picture, job.picture(result), named=f"--picture {picture}")
    if any(one.status in ("fail", "warn") for one in found):
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_UNKNOWN if found else EXIT_PASS)
