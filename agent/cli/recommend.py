"""The verb recommend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from agent.base import inputs
from agent.base.hosts import snapshots
from agent.base.options import host_option, lengths_option, machine_option, refuse_two_sources, root_option, rows_option
from agent.base.output import emit, say, waiting

_LIMIT_BYTES = 16 << 20


@click.command()
@host_option
@root_option
@machine_option
@click.option("--nodes", default=None, type=click.IntRange(1, 100_000), help="How many such nodes.")
@click.option("--network", default=None, metavar="100G", help="What joins the nodes: bits per second of each.")
@click.option("--rdma", "transport", flag_value="rdma", default=None, help="--network is RDMA.")
@click.option("--tcp", "transport", flag_value="tcp", default=None, help="--network is TCP.")
@click.option("--model", default=None, help="Known model name, or a Hugging Face config.json.")
@click.option("--method", default="lora", type=click.Choice(["full", "lora", "qlora"]), show_default=True)
@click.option("--sequence-length", default=2048, show_default=True, type=click.IntRange(1, 10_000_000))
@click.option("--global-batch", default=None, type=click.IntRange(1, 10_000_000), help="Sequences per optimizer step.")
@click.option("--engine", default="topoflight", show_default=True, help="What must be able to run the layout.")
@click.option("--precision", default="bf16", show_default=True, help="fp32, bf16, fp16, fp8 or mxfp8.")
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, adamw8bit, sgd, adafactor.")
@click.option("--packing", is_flag=True, help="Rows are packed to the sequence length.")
@lengths_option
@click.option("--dataset", default=None, metavar="FILE|OWNER/NAME[:PART]",
              help="Count its rows and measure them with the model's tokenizer.")  # fmt: skip
@click.option("--tokenizer", default=None, metavar="FOLDER|OWNER/NAME", help="Default: the model's.")
@rows_option
@click.option("--epochs", default=None, type=click.FloatRange(0, 1e6, min_open=True), help="Of the whole run.")
@click.option("--price", default=None, metavar="NUMBER|FILE",
              help="Of a node-hour, or a YAML file of such prices by machine: forecasts the run's cost.")  # fmt: skip
@click.option("--lora-rank", default=16, show_default=True, type=click.IntRange(1, 4096))
@click.option("--steps", default=None, type=click.IntRange(1), help="Of the whole run: forecasts its length.")
@click.option("--tokens", default=None, type=click.IntRange(1), help="Of the whole run, in place of --steps.")
@click.option(
    "--hours", default=None, type=click.FloatRange(0, 1e6, min_open=True), help="Of the whole run: steps that fit."
)
@click.option("--ranks-per-node", default=None, type=click.IntRange(1, 1024), help="Default: one per GPU.")
@click.option("--nccl", "nccl_version", default=None, help="NCCL version in use, e.g. 2.27.7.")
@click.option("--bench", "bench_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Result of `topoflight bench -o json`: measured bandwidths.")  # fmt: skip
@click.option("--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Result of `topoflight calibrate`.")  # fmt: skip
@click.option("--measured-step", nargs=2, type=(str, click.FloatRange(0, 1e6, min_open=True)), default=None,
              metavar="LAYOUT SECONDS",
              help="What a step of this job took, its layout as in --compare: forecasts go by it.")  # fmt: skip
@click.option("-o", "--output", "form", default="table", show_default=True,
              help="table, json, yaml, env, shell, k8s, or an export: see --list-exports.")  # fmt: skip
@click.option("--sweep", default=None, metavar="nodes=1,2,4",
              help="Compare the best layouts for each number of nodes, each of --machine A,B,... (or those of the "
              "--price file) and each --network A,B: time, money, and which nothing beats in both.")  # fmt: skip
@click.option("--plot", type=inputs.OUTPUT_FILE, help="With --sweep: write an SVG here.")
@click.option("--explain", is_flag=True, help="Reasons, other layouts, what was turned down, and the forecast's parts.")
@click.option("--compare", nargs=2, default=None, metavar="A B",
              help="Two layouts side by side: dp_shard=8 tp=8 or dp_shard=4,tp=2,micro_batch=2.")  # fmt: skip
@click.option("--list-exports", is_flag=True, help="Name the export formats and stop.")
def recommend(**options: object) -> None:
    """Advise the NCCL environment and the parallel layout, each with its reason.

    Without --model only the environment is advised. Exit code 3 where no layout of the model fits.
    """
    from agent.advice.advise import ENVIRONMENTS, FORMATS, advise, export
    from agent.advice.request import Request

    if options.pop("list_exports"):
        say("\n".join(FORMATS))
        return
    form = str(options.pop("form"))
    if form not in ("table", *FORMATS):
        raise click.UsageError(f"-o {form}: must be one of table, {', '.join(FORMATS)}")
    refuse_two_sources(options)
    _refuse_unused(options)
    request = Request.of(**options)
    if options["dataset"]:
        from agent.advice import dataset

        with waiting("recommend: measuring rows"):
            settings = dataset.named(str(options["dataset"]), request.tokenizer, request.model)
            request = dataset.with_rows(request, settings)
    if options["sweep"] or options["compare"]:
        from agent.cli import whatif

        whatif.run(request, options, form)
        return
    with waiting("recommend: forecasting layouts"):
        found = () if request.machine else snapshots(request.hosts, root=request.root)
        advice = advise(request, lambda: found)
    if form == "k8s":
        from agent.advice.pod_network import in_pods

        advice, left_out = in_pods(advice, found, here=not request.hosts)
        for line in left_out:
            say(f"note: {line}", err=True)
    if form in ("table", "json", "yaml"):
        explain = bool(options["explain"])
        from agent.terminal.advice import recommendation

        emit(advice, form, lambda out: recommendation(out, advice, explain=explain, brief=not explain))
    elif form in ENVIRONMENTS or advice.chosen is not None or advice.model is None:
        nodes = request.nodes or max(1, len(request.hosts))
        say(export(advice, form, nodes=nodes), nl=False)
    if advice.model is not None and advice.chosen is None:
        misses = sorted(advice.rejected, key=lambda row: row.rule != "memory-fits")
        nearest = "; ".join(f"{row.what}: {row.reason}" for row in misses[:3])
        could = "".join(f"\n{line}" for line in advice.helps_most[:1])
        verb = "is judged" if advice.backend == "rccl" else "fits"
        raise inputs.NothingFitsError(f"no layout of {advice.model.name} {verb} ({nearest}){could}")


def _refuse_unused(options: Mapping[str, object]) -> None:
    """UsageError for what would not be answered: an answer without it would read as if it had been."""
    if options["plot"] and not options["sweep"]:
        raise click.UsageError(f"--plot {options['plot']}: draws a --sweep; give --sweep nodes=1,2,4 too")
    for name in ("bench_file", "calibration", "measured_step"):
        if options[name] and options["sweep"]:
            word = f"--{name.removesuffix('_file').replace('_', '-')}"
            raise click.UsageError(f"{word}: is of the nodes it was taken on; not with --sweep")
    if options["sweep"] and options["compare"]:
        raise click.UsageError("--sweep and --compare: give one of them")
    if options["sweep"] and options["nodes"]:
        raise click.UsageError(
            f"--nodes {options['nodes']}: --sweep {options['sweep']} says how many; leave --nodes away"
        )
    if options["model"] is None:
        for name in ("steps", "tokens", "hours", "epochs", "rows", "dataset", "price", "lengths"):
            if options[name]:
                raise click.UsageError(f"--{name}: is of a forecast, and that needs --model")
