"""Measurements on one NVIDIA GPU. The most important steps come first, and each result is written at once.

    make gpu                                                  # 10 minutes, writes docs/measurements/gpu.md
    python bench/gpu.py --cpu --page /tmp/gpu.md --seconds 300   # the part that a CPU can run, with a tiny model

Each step has a time limit. The page also names steps that failed, that were not reached, or that this machine cannot
run. Nothing is downloaded: weights are random and rows are generated. Two ranks share the GPU and communicate over
sockets, as if they were on two hosts. This shows that a layout trains correctly, but not its speed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agent.base.options import read_snapshots  # noqa: E402
from collectives.bench import run as bench  # noqa: E402
from contracts import run_record  # noqa: E402
from contracts.tables import read_table  # noqa: E402
from probes.registry import ALL  # noqa: E402
from topology.build import build  # noqa: E402
from topology.formats.text import parse  # noqa: E402
from topology.graph import Pairs  # noqa: E402

PAGE = ROOT / "docs" / "measurements" / "gpu.md"
MODELS, RUNS, LAYOUTS = (read_table(__file__, "gpu.toml")[name] for name in ("model", "runs", "layouts"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node")
# NCCL refuses two ranks of one host on one GPU, so each rank sets its own NCCL_HOSTID (torchrun gives all the same).
APART = "export NCCL_HOSTID=$RANK LOCAL_RANK=0 LOCAL_WORLD_SIZE=1; exec "

# The collective that the benchmark measures, with torch alone: the median wall-clock time of 20 calls.
BARE = """
import json, sys, time, torch, torch.distributed as dist
size, cuda = int(sys.argv[1]), sys.argv[2] == "cuda"
dist.init_process_group("nccl" if cuda else "gloo")
device = "cuda:0" if cuda else "cpu"
ranks = dist.get_world_size()
whole = torch.zeros(size // 4, device=device); part = torch.zeros(size // 4 // ranks, device=device)
wait = torch.cuda.synchronize if cuda else (lambda: None)
times = []
for n in range(25):
    dist.barrier(); wait(); began = time.perf_counter()
    dist.all_gather_into_tensor(whole, part); wait()
    times.append(time.perf_counter() - began)
mid = torch.tensor(sorted(times[5:])[10], device=device)
dist.all_reduce(mid, dist.ReduceOp.MAX)
if dist.get_rank() == 0:
    print("BARE", json.dumps(size * (ranks - 1) / ranks / mid.item()))
"""

Row = tuple[str, str]
Step = tuple[str, Callable[[], Iterator[Row]]]  # title, and the function that yields its rows


def config_file(folder: Path, more: dict[str, Any], *, model: str) -> Path:
    """Write the job.json of a run, its rows, and the config.json of the model with this name in gpu.toml."""
    weights, rows = folder / model, folder / "rows.jsonl"
    weights.mkdir(exist_ok=True)
    (weights / "config.json").write_text(json.dumps({"model_type": "llama", **MODELS[model]}))
    length = 2048 if model.startswith("gpu") else 64
    rows.write_text("".join(json.dumps({"text": chr(97 + n % 26) * (length - 8)}) + "\n" for n in range(256)))
    settings = {
        "model_name_or_path": str(weights), "tokenizer_name": "builtin:bytes", "dataset_name": str(rows),
        "max_length": length, "max_steps": 12, "save_strategy": "no", "eval_strategy": "no",
        **{name: value for name, value in more.items() if name not in ("model", "options")},
    }  # fmt: skip
    path = folder / "job.json"
    path.write_text(json.dumps(settings))
    return path


def write_weights(path: Path, *, cpu: bool) -> None:
    """Write random weights for the config.json of a folder. Runs in a process whose end frees the GPU memory."""
    process = multiprocessing.get_context("spawn").Process(target=_write_weights, args=(path, cpu))
    process.start()
    process.join()


def _write_weights(path: Path, cpu: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)
    with torch.device("cpu" if cpu else "cuda:0"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    model.save_pretrained(path)


class Tier:
    """The steps in their order. Each yields rows for the page."""

    def __init__(self, *, cpu: bool, folder: Path, ends: float) -> None:
        self.cpu, self.folder, self.ends = cpu, folder, ends
        self.size = (1 if cpu else 64) << 20
        # Two ranks on one GPU are two hosts to NCCL, and communicate over sockets.
        self.one_gpu = {} if cpu else {"CUDA_VISIBLE_DEVICES": "0", "NCCL_IB_DISABLE": "1"}

    def steps(self) -> list[Step]:
        """Return all steps in their order."""
        runs = list(RUNS.items())[: 1 if self.cpu else None]
        return [
            ("Links against nvidia-smi", self.links),
            ("NCCL, two ranks on one GPU", self.collectives),
            ("Calibration", self.calibration),
            ("Layouts of two ranks", self.layouts),
            *((f"Fine-tune: {name}", lambda name=name, more=more: self.fine_tune(name, more)) for name, more in runs),
        ]

    def left(self, limit: float) -> float:
        """Return the seconds for a step: `limit`, or the rest of the time if that is less."""
        return max(1.0, min(limit, self.ends - time.monotonic()))

    def call(self, *command: str, limit: float, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command until it ends or its time is over."""
        return subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=self.left(limit), check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        )  # fmt: skip

    def links(self) -> Iterator[Row]:
        """Compare every cell of `nvidia-smi topo -m` with the matrix of the scan."""
        if shutil.which("nvidia-smi") is None:
            yield "cells", "not run: nvidia-smi is not installed"
            return
        text = self.call("nvidia-smi", "topo", "-m", limit=30).stdout
        theirs, ours = parse(text, "nvidia-smi topo -m"), build(read_snapshots((), ALL)[0])
        labels, wrong = Pairs(ours.pairs), []
        for pair in theirs.pairs:
            label = labels.label(pair.a, pair.b)
            if label != pair.label:
                wrong.append(f"{pair.a}-{pair.b}: nvidia-smi {pair.label}, scan {label}")
        yield "GPUs", f"nvidia-smi {len(theirs.gpus)}, scan {len(ours.gpus)}"
        yield "cells", f"{len(theirs.pairs)} compared, {len(wrong)} differ" + "".join(f"; {one}" for one in wrong[:8])

    def collectives(self) -> Iterator[Row]:
        """Measure the bus bandwidth with the benchmark and with torch alone, and read the transport in NCCL's log."""
        spec = bench.BenchSpec(
            ops=("all_gather",), sizes_bytes=(self.size,), distinct_hosts=not self.cpu, environment=self.one_gpu,
            budget_seconds=self.left(40), lock_path=str(self.folder / "lock"), force=True,
        )  # fmt: skip
        result = bench.run(spec)
        for problem in result.problems:
            yield "problem", problem
        ours = [m.busbw_bytes_per_second for m in result.measurements if m.verified]
        yield "all_gather", f"{ours[0] / 1e9:.3f} GB/s bus bandwidth, verified" if ours else "not verified"
        if result.evidence is not None:
            yield "transport", f"{result.evidence.inter_node_transport}, GPUDirect RDMA {result.evidence.gdrdma}"
        script = self.folder / "bare.py"
        script.write_text(BARE)
        ranks = f"{APART}{sys.executable} {script} {self.size} {'cpu' if self.cpu else 'cuda'}"
        done = self.call(sys.executable, *TORCHRUN, "2", "bash", "-c", ranks, limit=90, env=self.one_gpu)
        lines = [line for line in done.stdout.splitlines() if line.startswith("BARE ")]
        if not lines:
            yield "torch alone", f"failed: {_last(done.stderr)}"
            return
        bare = json.loads(lines[0][5:])
        ratio = f", ratio {ours[0] / bare:.2f}" if ours else ""
        yield "torch alone", f"{bare / 1e9:.3f} GB/s{ratio}"

    def calibration(self) -> Iterator[Row]:
        """Calibrate GEMMs and one layer."""
        limits = ["--budget", str(int(self.left(40 if self.cpu else 60))), "-f", str(self.folder / "calibration.json")]
        model = "tiny-llama" if self.cpu else "Llama-3.2-1B"
        done = self.call(sys.executable, "-m", "agent.cli", "calibrate", "--model", model, *limits, limit=150)
        if done.returncode:
            yield model, f"failed: {_last(done.stderr)}"
            return
        result = json.loads((self.folder / "calibration.json").read_text())
        yield "GPU", f"{result['device']}, {result['precision']}"
        yield "GEMM", f"{result['gemm_flops_per_second'] / 1e12:.3g} TFLOP/s"

    def layouts(self) -> Iterator[Row]:
        """Compare the losses of each layout with those of one rank, for the same weights and rows. All run at once."""
        runs: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        losses: dict[str, run_record.Loss] = {}
        for name, case in list(LAYOUTS.items())[: 2 if self.cpu else None]:
            out = self.folder / name.replace(" ", "-")
            out.mkdir()
            file = config_file(self.folder, {**case.get("settings", {}), "output_dir": str(out)}, model="layouts")
            if not runs:
                write_weights(self.folder / "layouts", cpu=self.cpu)
            layout = {**case["layout"], "precision": "fp32" if self.cpu else "bf16"}
            plan = {"config": json.loads(file.read_text()), "layout": layout}
            (out / "plan.json").write_text(json.dumps({**plan, "trl": plan["config"]} if case.get("trl") else plan))
            command = f"{APART}{sys.executable} -m finetune.train --plan {out}/plan.json"
            with (out / "log").open("wb") as log:
                runs.append((name, out, subprocess.Popen(
                    [sys.executable, *TORCHRUN, str(layout["world_size"]), "bash", "-c", command], cwd=ROOT,
                    stdout=log, stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **self.one_gpu},
                )))  # fmt: skip
        for name, out, process in runs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.left(150))
            process.terminate()
            process.wait(60)
            try:
                record = run_record.read(out / "run.json")
            except run_record.RecordError:
                yield name, f"failed: {_last((out / 'log').read_text())}"
                continue
            losses[name] = record.loss
            theirs = losses.get("LoRA, one rank" if name.startswith("LoRA") else "one rank", run_record.Loss())
            pairs = [(getattr(record.loss, at), getattr(theirs, at)) for at in ("first", "last")]
            apart = ", ".join(f"{one} ({one / other - 1:+.1e})" if one and other else str(one) for one, other in pairs)
            yield name, f"{_ending(record)}; {record.placements}; first and last loss {apart}"

    def fine_tune(self, name: str, settings: dict[str, Any]) -> Iterator[Row]:
        """Run a short fine-tune with `launch`, and compare each measured quantity with its forecast."""
        flash = settings.get("attn_implementation") == "flash_attention_2"
        for package, needed in (("flash_attn", flash), ("bitsandbytes", settings.get("load_in_4bit"))):
            if needed and find_spec(package) is None:
                yield "step", f"not run: {package} is not installed"
                return
        out = self.folder / name.replace(" ", "-").replace(",", "")
        model = "cpu" if self.cpu else settings.get("model", "gpu")
        file = config_file(self.folder, settings, model=model)
        if not [*(self.folder / model).glob("*.safetensors")]:
            write_weights(self.folder / model, cpu=self.cpu)
        done = self.call(
            sys.executable, "-m", "agent.cli", "launch", "--ranks", "1", "--no-preflight", "--config",
            str(file), "--output", str(out), *settings.get("options", ()), limit=200,
        )  # fmt: skip
        try:
            record = run_record.read(out / "run.json")
        except run_record.RecordError:
            yield "step", f"failed: {_last(done.stderr or done.stdout)}"
            return
        yield "status", _ending(record)
        if record.layout.effective is not None:
            yield "ran", record.placements
        for one in record.comparison:
            word = {True: "inside", False: "outside", None: "unknown"}[one.within]
            interval = f"{one.forecast.low:.4g} to {one.forecast.high:.4g}" if one.forecast else "none"
            yield one.quantity.replace("_", " "), f"{one.measured:.4g}, forecast {interval}: {word}"
        if record.communication is not None and record.communication.exposed_share is not None:
            yield "exposed communication", f"{record.communication.exposed_share:.0%} of the profiled steps"


def _ending(record: run_record.RunRecord) -> str:
    failed = "" if record.status == "complete" else "failed: "
    return failed + record.status + (f": {record.reason}" if record.reason else "")


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1][:300]


def hardware() -> str:
    """Return the GPU, CPU cores and versions of this machine in one line."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    parts = [gpu, f"{os.cpu_count()} CPU cores", f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if torch.cuda.is_available():
        parts += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    return ", ".join(parts)


def page(path: Path, head: str, done: list[tuple[str, list[Row]]], left: list[Step]) -> None:
    """Write the results so far and the titles of the steps that were not run yet."""
    lines = ["# On a GPU", "", head, ""]
    for title, rows in done:
        lines += [f"## {title}", "", *(f"- {name}: {text}" for name, text in rows), ""]
    if left:
        lines += ["## Not reached", "", *(f"- {title}" for title, _ in left), ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    """Run the steps. Return 0 if every step ran to its end, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="run the part that a CPU can run, with a tiny model")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only", default="", help="regular expression for the titles of the steps; default: all steps")
    parser.add_argument("--folder", type=Path, help="folder for files of the steps; default: a temporary folder")
    arguments = parser.parse_args()
    if not arguments.cpu and not any(Path("/dev").glob("nvidia[0-9]*")):
        print("gpu: no NVIDIA GPU on this host. --cpu runs the part that a CPU can run.", file=sys.stderr)
        return 2
    if arguments.cpu and arguments.page == PAGE:
        parser.error("--cpu requires --page, because docs/measurements/gpu.md has only figures of a GPU")
    command = shlex.join(["python", "bench/gpu.py", *sys.argv[1:]])
    head = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, `{command}`, {hardware()}."
    done: list[tuple[str, list[Row]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        ends = time.monotonic() + arguments.seconds
        tier = Tier(cpu=arguments.cpu, folder=arguments.folder or Path(temporary), ends=ends)
        left = [step for step in tier.steps() if re.search(arguments.only, step[0])]
        page(arguments.page, head, done, left)
        while left and time.monotonic() < tier.ends:
            (title, step), *left = left
            rows: list[Row] = []
            done.append((title, rows))
            try:
                for row in step():
                    rows.append(row)
                    print(f"{title}: {row[0]}: {row[1]}", flush=True)
                    page(arguments.page, head, done, left)
            except subprocess.TimeoutExpired:
                rows.append(("failed", "not finished within the time limit"))
            except Exception as error:  # noqa: BLE001 - the next steps can still run
                rows.append(("failed", f"{type(error).__name__}: {str(error)[:300]}"))
                print(f"{title}: failed: {error}", flush=True)
            page(arguments.page, head, done, left)
    return int(bool(left) or any("failed" in word for _, rows in done for row in rows for word in row))


if __name__ == "__main__":
    sys.exit(main())
