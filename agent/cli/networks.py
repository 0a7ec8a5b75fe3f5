"""The verb compare-networks: one fine-tune over each network, side by side."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agent.cli.inputs import InputError
from agent.cli.output import Progress, emit, format_option, say
from agent.cli.preflight import with_model_options

if TYPE_CHECKING:
    from rich.console import Console

    from agent.jobs.networks import NetworkBars

DEFAULT_NETWORKS = ("eth0=200mbit", "net1=500mbit")


@click.command("compare-networks")
@with_model_options
@click.option("--over", "networks", multiple=True, metavar="INTERFACE=RATE",
              help=f"A network to make and run over, shaped. Default: {' and '.join(DEFAULT_NETWORKS)}.")  # fmt: skip
@click.option("--steps", default=None, type=click.IntRange(1), help="Of the whole run, for time and money. Default: "
              "as many as are run.")  # fmt: skip
@click.option("--price", default=None, type=click.FloatRange(0, 1e9), help="Of a node-hour, for money.")
@click.option("--timeout", default=600.0, show_default=True, type=click.FloatRange(1, 86400),
              help="Seconds for each run.")  # fmt: skip
@click.option("--if-possible", is_flag=True, help="Where it cannot be done here, say why and end with 0.")
@click.option("--report", "folder", default=Path("reports"), show_default=True, help="For networks.svg, networks.json "
              "and the records.", type=click.Path(file_okay=False, path_type=Path))  # fmt: skip
@format_option
def compare_networks(form: str, if_possible: bool, **given: Any) -> None:
    """Run the same fine-tune over each network; draw time, money and forecast of each. Makes load.

    Two network namespaces of this host, one rank each on the CPU, as root. Each network is measured first, which gives
    the forecast; the ranks' own sockets prove which one a run took. Exit code 0 all were run, 1 it cannot be done here,
    3 a run failed, 5 one was not proven.
    """
    from agent.jobs.namespaces import NamespaceError
    from collectives.bench.lock import BusyError

    try:
        found = _here(given)
    except (NamespaceError, BusyError) as error:
        if if_possible:
            say(f"networks: not compared: {error}", err=True)
            return
        raise click.ClickException(f"not compared: {error}") from None
    _leave(found, given["folder"])
    emit(found, form, lambda out: show(out, found))
    say(f"report: {given['folder'] / 'networks.svg'}, {given['folder'] / 'networks.json'}", err=True)
    sys.exit(found.exit_code)


def _here(given: dict[str, Any]) -> NetworkBars:
    """Over namespaces of this host."""
    from agent.advise import Request, RequestError
    from agent.cli.hosts import snapshots
    from agent.cli.job_settings import EMBEDDED_MODEL, said
    from agent.jobs import namespaces, networks
    from agent.jobs.benchmark import job_request
    from agent.jobs.launch import LaunchError, sigterm
    from agent.jobs.namespaces import HOSTS
    from agent.jobs.result_store import keep_flight
    from contracts.run_record import read

    if given["ranks"] not in (None, HOSTS):
        raise click.UsageError(f"--ranks {given['ranks']}: is {HOSTS} here, one in each namespace")
    try:
        shaped = namespaces.parse(given["networks"] or DEFAULT_NETWORKS)
        settings = said(given["config"], given["overrides"])
        overrides = tuple(given["overrides"])
        if "max_steps" not in settings:
            overrides += (f"max_steps={networks.STEPS}",)
        for name in ("save_strategy", "eval_strategy"):
            overrides += () if name in settings else (f"{name}=no",)
        request = Request(model=given["model"], method=given["method"], global_batch=given["global_batch"] or HOSTS,
                          nodes=HOSTS, ranks_per_node=1)  # fmt: skip
        if given["sequence_length"]:
            request = replace(request, sequence_length=given["sequence_length"])
        request = job_request(request, given["config"], overrides)
    except (RequestError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    if why := namespaces.missing():
        raise namespaces.NamespaceError(why)
    progress = Progress()
    place = given["folder"] / "networks" / time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    job = networks.Local(
        request=request, config=given["config"], overrides=overrides, folder=place.absolute(),
        timeout_seconds=given["timeout"], note=lambda text: progress.step(f"networks: {text}"),
    )  # fmt: skip
    with sigterm() as stop:
        try:
            bars = networks.compare_here(job, shaped, snapshots(()), stop)
        except (networks.NetworksError, LaunchError) as error:
            raise InputError(str(error)) from None
        finally:
            progress.done()
    records = [read(Path(bar.record)) for bar in bars if bar.record]
    for record in records:
        keep_flight(record)
    done = max((record.steps_done or 0 for record in records), default=0)
    model = "a tiny Llama" if request.model == EMBEDDED_MODEL else request.model
    family = job.layout.family if job.layout else ""
    return networks.priced(networks.NetworkBars(
        title=f"One fine-tune of {model}, {family} over {HOSTS} ranks, by network",
        where="two network namespaces of this host, one rank each on the CPU; networks shaped by tc tbf",
        nodes=HOSTS, steps=given["steps"] or done, node_hour_price=given["price"], bars=tuple(bars),
    ))  # fmt: skip


def _leave(found: NetworkBars, folder: Path) -> None:
    """The picture and the document."""
    from agent.documents import render, write_atomic
    from agent.jobs.networks import picture

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "networks.svg", picture(found))
        write_atomic(folder / "networks.json", render(found, "json"))
    except OSError as error:
        raise click.ClickException(f"--report {folder}: {error.strerror or error}") from None


def show(out: Console, found: NetworkBars) -> None:
    """The bars on the terminal."""
    from rich.markup import escape
    from rich.table import Table

    from agent import units
    from agent.jobs.networks import words_of
    from agent.pages import charts

    drawn = [charts.Run(label=bar.network, value=bar.step_seconds, shown="") for bar in found.bars if bar.step_seconds]
    blocks = {label: block for label, block, _ in charts.blocks(drawn, 20)}
    best = min((run.value for run in drawn), default=0.0)
    out.print(f"\n[bold]{escape(found.title)}[/bold]\n{escape(found.where)}")
    rows = Table.grid(padding=(0, 2))
    for bar in found.bars:
        words = "\n".join(words_of(bar, best)) if bar.step_seconds else f"{bar.status}: {bar.why}"
        rows.add_row(escape(bar.network), blocks.get(bar.network, ""), escape(words))
    out.print(rows)
    for bar in found.bars:
        if bar.step_seconds:
            rate = f"; measured before: {units.rate(bar.busbw_bytes_per_second)}" if bar.busbw_bytes_per_second else ""
            out.print(escape(f"{bar.network}: {bar.carries}; proven by {'; '.join(bar.proof)}{rate}"), highlight=False)
    for note in found.notes:
        out.print(escape(note))
