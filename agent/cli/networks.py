"""The verb compare-networks: run one fine-tune over each network and compare the runs."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agent.base.hosts import snapshots
from agent.base.options import command, require_writable
from agent.base.output import Progress, emit, print_text, render, waiting, write_atomic

if TYPE_CHECKING:
    from rich.console import Console

    from agent.jobs.networks import NetworkBars

DEFAULT_NETWORKS = ("eth0,200M", "net1,500M")


@command("compare-networks")
def compare_networks(form: str, if_possible: bool, verbose: bool, **options: Any) -> None:
    """Run the job over each network, write the report, and exit with the verdict's code."""
    from agent.jobs.namespaces import NamespaceError
    from agent.jobs.networks import picture
    from collectives.bench.processes import BusyError

    if not options["dry_run"]:
        require_writable("--report", options["folder"], folder=True)
    try:
        found = _here(options) if options["api"] == "local" else _there(options)
    except (NamespaceError, BusyError) as error:
        if if_possible:
            print_text(f"networks: not compared: {error}", err=True)
            return
        raise click.ClickException(f"not compared: {error}") from None
    folder: Path = options["folder"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "networks.svg", picture(found))
        write_atomic(folder / "networks.json", render(found, "json"))
    except OSError as error:
        raise click.ClickException(f"--report {folder}: {error.strerror or error}") from None
    emit(found, form, lambda out: show(out, found, verbose=verbose))
    print_text(f"report: {folder / 'networks.svg'}, {folder / 'networks.json'}", err=True)
    sys.exit(found.exit_code)


def _here(options: dict[str, Any]) -> NetworkBars:
    """Run over network namespaces of this host."""
    from agent.advice.job_settings import job_request, settings
    from agent.advice.request import Request
    from agent.base.result_store import store_run
    from agent.jobs import namespaces, networks
    from agent.jobs.benchmark import stop_on_signals
    from agent.jobs.namespaces import HOSTS
    from contracts.run_record import read
    from probes.registry import ALL

    if options["ranks"] not in (None, HOSTS):
        raise click.UsageError(f"--ranks {options['ranks']}: is {HOSTS} here, one in each namespace")
    over = networks.parse(options["networks"] or DEFAULT_NETWORKS, here=True)
    explicit = settings(options["config"], options["overrides"]).explicit
    defaults = {"max_steps": networks.STEPS, "save_strategy": "no", "eval_strategy": "no"}
    unset = (f"{name}={value}" for name, value in defaults.items() if name not in explicit)
    overrides = (*options["overrides"], *unset)
    request = Request.of(
        model=options["model"], method=options["method"], sequence_length=options["sequence_length"],
        global_batch=options["global_batch"] or HOSTS, nodes=HOSTS, ranks_per_node=1,
    )  # fmt: skip
    request = job_request(request, options["config"], overrides)
    if why := namespaces.missing():
        raise namespaces.NamespaceError(why)
    progress = Progress()
    place = options["folder"] / "networks" / time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    job = networks.Local(
        request=request, config=options["config"], overrides=overrides, folder=place.absolute(),
        timeout_seconds=options["timeout"], note=lambda text: progress.step(f"networks: {text}"),
    )  # fmt: skip
    with stop_on_signals(signal.SIGTERM) as (stop, _):
        bars = networks.compare_here(job, over, snapshots((), ALL), stop)
    records = [read(Path(bar.record)) for bar in bars if bar.record]
    for record in records:
        store_run(record)
    done = max((record.steps_done or 0 for record in records), default=0)
    return networks.priced(networks.NetworkBars(
        title=_title(request.model, job.layout.family if job.layout else "", HOSTS),
        where="two network namespaces of this host, one rank each on the CPU; networks shaped by tc tbf",
        nodes=HOSTS, steps=options["steps"] or done, node_hour_price=options["price"], bars=tuple(bars),
    ))  # fmt: skip


def _title(model: str | None, family: str, ranks: int) -> str:
    from agent.advice.job_settings import EMBEDDED_MODEL

    name = "a tiny Llama" if model == EMBEDDED_MODEL else model
    return f"One fine-tune of {name}, {family} over {ranks} ranks, by network"


def _there(options: dict[str, Any]) -> NetworkBars:
    """Run one cluster job per network, one after another; with --dry-run print the jobs and exit."""
    from agent.advice.advise import answer, in_pods, with_fsdp
    from agent.advice.job_settings import EMBEDDED_MODEL, settings, training_request, transport
    from agent.advice.request import for_whole_run, with_rows
    from agent.base.options import RequestError
    from agent.cluster.client import connect
    from agent.jobs import cluster_job, networks
    from planner.kubernetes.manifests import render as render_documents
    from probes.registry import ALL

    options = {**options, "machine": None, "dra": (), "nodes": options["nodes"] or 2}
    over = networks.parse(options["networks"], here=False)
    explicit = settings(options["config"], options["overrides"]).explicit
    request = for_whole_run(with_rows(training_request(options), explicit), explicit)
    found = snapshots(options["hosts"], ALL, root=options["root"])
    bars, jobs = [], []
    advice = answer(request, found)
    if advice.model and advice.model.name == EMBEDDED_MODEL:
        advice = with_fsdp(advice)
    if advice.chosen is None:
        raise RequestError("no layout fits: " + "; ".join(row.reason for row in advice.rejected[:2]))
    layout = advice.chosen.layout
    cluster_job.refuse_what_cannot_train(advice, options)
    advice, left_out = in_pods(advice, found, here=not options["hosts"])
    for network in over:
        if network.rdma and not transport(advice, found):
            why = "no RDMA device was seen on the recorded hosts"
            bars.append(networks.Bar(network="rdma", status="not available", why=why))
            continue
        taken = networks.over(advice, network, request, found)
        jobs.append((network, networks.documents(taken, network, options, found)))
    for line in left_out:
        print_text(f"note: {line}", err=True)
    if options["dry_run"]:
        for bar in bars:
            print_text(f"{bar.network}: {bar.status}: {bar.why}", err=True)
        print_text(
            render_documents([*cluster_job.storage(options), *(one for _, made in jobs for one in made)]), nl=False
        )
        sys.exit(0)
    client = connect(options["context"])
    for number, (network, made) in enumerate(jobs):
        made = (*cluster_job.storage(options), *made) if number == 0 else made
        with waiting(f"networks: {cluster_job.named(made[-1])} over {network.name}"):
            bars.append(networks.run(
                client, made, network, options["api"], seconds=options["timeout"],
                report=lambda line: print_text(line, err=True), sleep=time.sleep, clock=time.monotonic,
            ))  # fmt: skip
    order = {network.name: place for place, network in enumerate(over)}
    return networks.priced(networks.NetworkBars(
        title=_title(request.model, layout.family, layout.world_size),
        where=f"{options['nodes']} pods of namespace {options['namespace']}, by {options['api']}",
        nodes=options["nodes"], steps=options["steps"] or advice.total_steps or explicit.get("max_steps") or 1,
        node_hour_price=options["price"], bars=tuple(sorted(bars, key=lambda bar: order[bar.network])),
    ))  # fmt: skip


def show(out: Console, found: NetworkBars, *, verbose: bool = False) -> None:
    """Print the verdict and the bars; if `verbose`, also the evidence."""
    from rich.markup import escape

    from agent.base import units
    from agent.base.tables import grid
    from agent.jobs.networks import words_of
    from agent.terminal.measured import blocks

    steps = [bar.step_seconds for bar in found.bars if bar.step_seconds]
    best, longest = min(steps, default=0.0), max(steps, default=1.0)
    out.print(escape(_verdict(found, verbose=verbose)))
    out.print(f"[dim]{escape(found.title)}[/dim]")
    rows = grid(2, 3)
    for bar in found.bars:
        words = "\n".join(words_of(bar, best)) if bar.step_seconds else f"{bar.status}: {bar.why}"
        block = blocks(bar.step_seconds / longest) if bar.step_seconds else ""
        rows.add_row(escape(bar.network), block, escape(words))
    out.print(rows)
    if verbose:
        out.print(escape(found.where))
        for bar in filter(lambda bar: bar.step_seconds, found.bars):
            rate = f"; measured before: {units.rate(bar.busbw_bytes_per_second)}" if bar.busbw_bytes_per_second else ""
            out.print(escape(f"{bar.network}: {bar.carries}; proven by {'; '.join(bar.proof)}{rate}"), highlight=False)


def _verdict(found: NetworkBars, *, verbose: bool) -> str:
    """Return the verdict: the fastest network, and the recommended action."""
    ran = sorted((bar for bar in found.bars if bar.step_seconds), key=lambda bar: bar.step_seconds or 0.0)
    wrong = [f"{bar.network} {bar.status}" for bar in found.bars if bar.status not in ("measured", "not available")]
    if wrong:
        return (
            f"{'✗' if found.exit_code == 3 else '?'} not every network was measured: {', '.join(wrong)} → the reasons"
        )
    if len(ran) < 2:
        return f"? {len(ran)} network ran: nothing to compare → add another with --over"
    first, *rest = ran
    times = ", ".join(f"{bar.network} {(bar.step_seconds or 0) / (first.step_seconds or 1):.3g} x" for bar in rest)
    more = "" if verbose else " (-v: the proof)"
    return f"✓ {first.network} is the fastest ({times} as long) → use it for the job{more}"
