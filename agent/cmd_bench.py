"""The verbs bench, evidence and calibrate."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import click

from agent import keep, terminal, units
from agent.exits import EXIT_FAILED, EXIT_PASS, EXIT_TOOL_ERROR
from agent.output import Progress, console, emit, format_option, render
from agent.report import write_atomic
from collectives.results import BenchResult


@click.command()
@click.option("--op", "ops", multiple=True, help="Collective; repeat for several. Default: all_gather, reduce_scatter.")
@click.option(
    "--ranks", default=None, type=click.IntRange(1, 1024), help="Ranks on this host. Default: one per GPU, else 2."
)
@click.option("--min-bytes", default=65536, show_default=True, type=click.IntRange(1))
@click.option("--max-bytes", default=16 << 20, show_default=True, type=click.IntRange(1))
@click.option(
    "--size", "sizes", multiple=True, type=click.IntRange(1), help="Exact sizes in bytes, in place of the sweep."
)
@click.option("--precision", default="5%", show_default=True, help="Stop a size when its interval is this tight.")
@click.option(
    "--budget", default=60.0, show_default=True, type=click.FloatRange(1, 86400), help="Seconds for all sizes."
)
@click.option(
    "--nodes", "hosts", default=1, show_default=True, type=click.IntRange(1, 100_000), help="Hosts that run this line."
)
@click.option("--rendezvous", default=None, metavar="HOST:PORT", help="Where several hosts meet.")
@click.option("--node-rank", default=None, type=click.IntRange(0), envvar="JOB_COMPLETION_INDEX",
              help="Which host this is; else torchrun's rendezvous decides.")  # fmt: skip
@click.option("--host-name", default=None, envvar="NODE_NAME", help="What results call this host.")
@click.option("--search", is_flag=True, help="Search for slow hosts by pairs, in place of a sweep.")
@click.option("--like", "model", default=None, help="Replay one training step's communication of this model.")
@click.option("--layout", default=None, help="With --like: dp_replicate=1,dp_shard=2,tp=1,pp=1")
@click.option("--force", is_flag=True, help="Run although GPUs are in use by others.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Also write the JSON result here.")
@format_option
def bench(form: str, save: Path | None, **options: Any) -> None:
    """Measure collectives with real ranks. Makes load: one benchmark at a time per host.

    Exit code 0 measured and verified, 3 wrong data or an incomplete run.
    """
    from agent.benchmark import replay_spec, spec_of, watch
    from collectives.bench import SpecError, run
    from collectives.lock import BusyError
    from planner.models import ModelError

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    progress = Progress()
    try:
        spec = spec_of(options)
        if options["model"]:
            spec = replay_spec(spec, options["model"], options["layout"] or f"dp_shard={spec.world_size}")
        progress.step(f"measure: {spec.world_size} ranks, up to {units.seconds(spec.budget_seconds)}")
        result = run(spec, watch(progress), stop)
    except (SpecError, ModelError) as error:
        raise click.UsageError(str(error)) from None
    except BusyError as error:
        raise click.ClickException(str(error)) from None
    finally:
        progress.done()
    keep.keep_bench(result)
    emit(result, form, lambda out: terminal.bench(out, result))
    if save is not None:
        from collectives.wire import result_to_json

        try:
            write_atomic(save, json.dumps(result_to_json(result), indent=1) + "\n")
        except OSError as error:  # last: a full disk must not cost the result, which stands on stdout by now
            raise click.ClickException(f"--save {save}: {error.strerror}") from None
    sys.exit(_bench_exit(result))


def _bench_exit(result: BenchResult) -> int:
    whole = result.complete and result.measurements and all(m.verified for m in result.measurements)
    return EXIT_PASS if whole else EXIT_FAILED


@click.command()
@click.argument("source", metavar="FILE|-", default="-")
@click.option(
    "--port", "ports", multiple=True, help="An RDMA port that should appear (mlx5_0:1): a missing one is dead."
)
@click.option("--fail-on", default="fail", type=click.Choice(["fail", "warn"]), show_default=True)
@click.option("--require-gdrdma/--no-require-gdrdma", default=True, show_default=True,
              help="Whether RDMA without GPUDirect fails: EFA of g5 and g6 has none.")  # fmt: skip
@format_option
def evidence(
    source: str, ports: tuple[str, ...], fail_on: Literal["fail", "warn"], require_gdrdma: bool, form: str
) -> None:
    """Prove from an NCCL log which transport every channel takes.

    `kubectl logs JOB | topoflight evidence -`. Exit code 0 proven good, 3 a failure, 4 a warning with --fail-on warn,
    5 no evidence.
    """
    from collectives import evidence as reader

    try:
        found = reader.read_file(source, ports=ports or None)
    except OSError as error:
        raise click.ClickException(f"{source}: {error.strerror}") from None
    emit(reader.to_json(found), form, lambda out: terminal.evidence(out, found))
    sys.exit(reader.exit_code(found, fail_on=fail_on, require_gdrdma=require_gdrdma))


@click.command()
@click.option("--model", default="tiny-llama", show_default=True, help="Shapes to measure: a known model name.")
@click.option("--sequence-length", default=2048, show_default=True, type=click.IntRange(1, 1 << 20))
@click.option(
    "--tokens", default=None, type=click.IntRange(1, 1 << 22), help="Of one micro-batch. Default: one sequence."
)
@click.option("--method", default="lora", type=click.Choice(["full", "lora"]), show_default=True)
@click.option("--budget", default=90.0, show_default=True, type=click.FloatRange(1, 3600), help="Seconds.")
@click.option(
    "--ranks", default=None, type=click.IntRange(1, 64), help="Processes that compute at once. Default: as a job would."
)
@click.option("-f", "--file", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write here, not stdout.")
def calibrate(
    model: str,
    sequence_length: int,
    tokens: int | None,
    method: str,
    budget: float,
    ranks: int | None,
    target: Path | None,
) -> None:
    """Measure GEMMs of the model's shapes and one layer, so that forecasts narrow. Makes load."""
    from agent.benchmark import calibration, default_ranks, has_gpu
    from agent.hosts import snapshots

    found_hosts = snapshots(())
    copies = ranks or default_ranks(found_hosts)
    progress = Progress()
    progress.step(f"calibrating for {model} with {copies} ranks, up to {units.seconds(budget)}")
    try:
        found = calibration(
            model, sequence_length=sequence_length, tokens=tokens or sequence_length, budget_seconds=budget,
            ranks=copies, method=method, gpu=has_gpu(found_hosts),
        )  # fmt: skip
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except RuntimeError as error:
        click.echo(f"calibration failed: {error}", err=True)
        sys.exit(EXIT_TOOL_ERROR)
    finally:
        progress.done()
    text = render(found, "json")
    if target is None:
        click.echo(text, nl=False)
    else:
        write_atomic(target, text)
        console().print(f"{target}: written")
