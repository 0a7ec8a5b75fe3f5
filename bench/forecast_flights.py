"""Forecast against flight on this host: the same jobs forecast from a calibration, then flown, part by part.

    python bench/forecast_flights.py [--steps 10] [--case NAME] [--page FILE]

Measures all-gather and reduce-scatter, times a layer of each model, asks the planner for each layout and flies it with
the job that ships. No forecast knows of its flight.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.finetune_vs_trl import make_inputs  # noqa: E402
from collectives.bench.calibrate import CalibrationRequest, calibrate  # noqa: E402
from collectives.bench.plan import BenchSpec  # noqa: E402
from collectives.bench.results import Measurement  # noqa: E402
from collectives.bench.run import run as run_bench  # noqa: E402
from contracts.layout import Layout  # noqa: E402
from planner.advice import Forecast  # noqa: E402
from planner.forecast.calibration import Calibration, parse_calibration  # noqa: E402
from planner.forecast.models import model_from_config, model_named  # noqa: E402
from planner.forecast.specs import Method, ModelSpec, TrainSpec  # noqa: E402
from planner.recommend import forecast_layout, plan  # noqa: E402
from topology.graph import ClusterTopology, NodeTopology  # noqa: E402

SMALL_TOKENS = 51.0  # of a row of the embedded data set, on average
SMALL_LONGEST = 52
WIDE_TOKENS = 256
SAVED = ("embed_tokens", "lm_head")  # what the embedded job trains beside its adapters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One job under one layout; the global batch follows from the layout."""

    name: str
    model: str  # "small" is the embedded job's, "wide" that of the comparison with TRL
    layout: dict[str, Any]
    method: Method = "lora"


def _cases() -> list[Case]:
    fsdp, ddp = {"dp_shard": 2}, {"dp_replicate": 2, "sharding": "ddp"}
    small, wide = {"micro_batch": 8}, {"micro_batch": 4}
    return [
        Case(name="small LoRA FSDP", model="small", layout=fsdp | small),
        Case(name="small LoRA DDP", model="small", layout=ddp | small),
        Case(name="small full FSDP", model="small", layout=fsdp | small, method="full"),
        Case(name="wide LoRA one rank", model="wide", layout={"sharding": "ddp"} | wide),
        Case(name="wide LoRA FSDP", model="wide", layout=fsdp | wide),
        Case(name="wide LoRA FSDP kept gathered", model="wide", layout=fsdp | wide | {"sharding": "zero2"}),
        Case(name="wide LoRA FSDP checkpointing", model="wide", layout=fsdp | wide | {"checkpointing": "full"}),
        Case(name="wide LoRA DDP", model="wide", layout=ddp | wide),
        Case(name="wide LoRA TP", model="wide", layout={"tp": 2} | wide),
        Case(name="wide LoRA PP", model="wide", layout={"pp": 2, "micro_batch": 1, "gradient_accumulation": 4}),
        Case(name="wide full FSDP", model="wide", layout=fsdp | wide, method="full"),
        Case(name="wide full FSDP accumulating", model="wide", method="full",
             layout=fsdp | {"micro_batch": 2, "gradient_accumulation": 2}),
        Case(name="wide full DDP", model="wide", layout=ddp | wide, method="full"),
    ]  # fmt: skip


def layout_of(case: Case) -> Layout:
    """The case's layout, in fp32."""
    degrees = [case.layout.get(name, 1) for name in ("dp_replicate", "dp_shard", "tp", "pp")]
    return Layout(world_size=math.prod(degrees), precision="fp32", **case.layout)


def forecast(case: Case, shape: ModelSpec, measured: tuple[Measurement, ...], calibration: Calibration) -> Forecast:
    """What the planner says of this case on this host."""
    layout = layout_of(case)
    tokens = SMALL_TOKENS if case.model == "small" else None
    train = TrainSpec(
        method=case.method, lora_rank=8, sequence_length=SMALL_LONGEST if case.model == "small" else WIDE_TOKENS,
        mean_tokens=tokens, saved_modules=SAVED if case.model == "small" else (), global_batch=layout.global_batch,
        precision="fp32",
    )  # fmt: skip
    host = NodeTopology(hostname="here", gpus=(), nics=(), pairs=(), cpu_count=os.cpu_count())
    planned = plan(
        ClusterTopology(nodes=(host,)), (), shape, train, measured, calibration, ranks_per_node=layout.world_size
    )
    return forecast_layout(planned, layout).forecast


def timed(shape: ModelSpec, case: Case, ranks: int) -> Calibration:
    """A layer of the model, as many copies at once as the job has ranks."""
    per_row = SMALL_TOKENS if case.model == "small" else WIDE_TOKENS
    rows = case.layout.get("micro_batch", 1)
    request = CalibrationRequest(
        hidden=shape.hidden, ffn=shape.ffn, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        tokens=int(per_row) * rows, sequence=int(per_row), copies=ranks, threads=1,
        method="full" if case.method == "full" else "lora",
    )  # fmt: skip
    return parse_calibration(calibrate(request))


def fly(case: Case, predicted: Forecast, folder: Path, inputs: Path, steps: int) -> dict[str, Any]:
    """The job under this layout; its flight.json."""
    out = folder / case.name.replace(" ", "-")
    out.mkdir(parents=True, exist_ok=True)
    layout = layout_of(case)
    document = {"layout": dataclasses.asdict(layout), "environment": {}, "forecast": dataclasses.asdict(predicted)}
    (out / "plan.json").write_text(json.dumps(document))
    settings = [f"output_dir={out}", f"max_steps={steps}", "save_strategy=no", "eval_strategy=no", "lora_r=8"]
    if case.model == "wide":
        settings += [f"model_name_or_path={inputs / 'model'}", f"dataset_name={inputs / 'train.jsonl'}",
                     "lora_modules_to_save=[]", "tokenizer_name=null", f"max_length={WIDE_TOKENS}"]  # fmt: skip
    if case.method == "full":
        settings += ["use_peft=false"]
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={layout.world_size}",
            "-m", "finetune.train", "--plan", str(out / "plan.json"), *settings]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case.name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads((out / "flight.json").read_text())
    return found


def memory_row(case: Case, flight: dict[str, Any], predicted: Forecast) -> str:
    """The fullest rank's peak beside its forecast, and what the process grew to with what the allocator keeps, MiB."""
    low, mid, high = (f"{bound / 2**20:.0f}" for bound in dataclasses.astuple(predicted.memory_bytes)[:3])
    took, grown = flight["measured"]["memory_bytes"], flight["measured"]["rss_growth_bytes"]
    inside = "yes" if predicted.memory_bytes.low <= took <= predicted.memory_bytes.high else "no"
    return (f"| {case.name} | {mid} ({low} to {high}) | {took / 2**20:.0f} | {took / predicted.memory_bytes.mid:.2f} | "
            f"{inside} | {grown / 2**20:.0f} |")  # fmt: skip


def parts_words(flight: dict[str, Any]) -> str:
    """ "compute 110 (98), all-gather 20 (15)": measured and forecast milliseconds."""
    return ", ".join(
        f"{part['part']} {part['measured_seconds'] * 1e3:.0f} ({(part['forecast_seconds'] or 0) * 1e3:.0f})"
        for part in flight["parts"]
    )


def main() -> None:
    """Measure, forecast, fly, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--case", action="append", help="only cases whose name holds this")
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    chosen = [c for c in _cases() if not arguments.case or any(word in c.name for word in arguments.case)]
    folder = ROOT / ".cache" / "forecast-flights"
    inputs = folder / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    make_inputs(inputs, WIDE_TOKENS, rows=64)
    shapes = {"small": model_named("tiny-llama"),
              "wide": model_from_config(json.loads((inputs / "model" / "config.json").read_text()))}  # fmt: skip
    lines = ["| job | forecast, s | measured, s | ratio | inside | by part, ms measured (forecast) |",
             "|---|---|---:|---:|---|---|"]  # fmt: skip
    memory = ["| job | forecast, MiB | measured | ratio | inside | resident |", "|---|---|---:|---:|---|---:|"]
    ratios = []
    for case in chosen:
        ranks = layout_of(case).world_size
        measured: tuple[Measurement, ...] = ()
        if ranks > 1:
            swept = run_bench(BenchSpec(ranks_per_host=ranks, budget_seconds=8.0))
            measured = tuple(m for m in swept.measurements if m.verified)
        predicted = forecast(case, shapes[case.model], measured, timed(shapes[case.model], case, ranks))
        flight = fly(case, predicted, folder / time.strftime("%H%M%S"), inputs, arguments.steps)
        took, step = flight["measured"]["step_seconds"], predicted.step_seconds
        ratios.append(took / step.mid)
        inside = "yes" if step.low <= took <= step.high else "no"
        lines.append(f"| {case.name} | {step.mid:.3g} ({step.low:.3g} to {step.high:.3g}) | {took:.3g} | "
                     f"{took / step.mid:.2f} | {inside} | {parts_words(flight)} |")  # fmt: skip
        memory.append(memory_row(case, flight, predicted))
        print(lines[-1], memory[-1], sep="\n", flush=True)
    logs = [math.log(r) for r in ratios]
    lines += ["", f"{len(logs)} jobs: mean of the ratios {math.exp(statistics.fmean(logs)):.2f}, standard deviation of "
              f"their logarithms {statistics.pstdev(logs):.2f}"]  # fmt: skip
    print(lines[-1])
    lines += ["", *memory]
    if arguments.page:
        arguments.page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
