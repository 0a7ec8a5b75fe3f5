"""Our fine-tune job against TRL's SFTTrainer: same model, rows, batch and precision, on this host, taking turns.

    python bench/finetune_vs_trl.py [--rounds 3] [--ranks 1 2] [--steps 12]

TRL lives in an environment of its own under .cache/compare (made at the first run: `trl`, `accelerate`, `datasets` on
top of this one's torch and transformers). Prints tokens per second and peak memory of each run, and the ratios of the
medians with the interval that holds 95 % of them when rounds are drawn again (a bootstrap of pairs). On a host without
GPUs two ranks are DDP in both: SFTTrainer with `fsdp: true` falls back to it there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHAPE = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 2048,
}  # fmt: skip
WARM_UP = 3
TRL = """
import json, os, resource, statistics, sys, time
job = json.loads(sys.argv[1])
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

class Clock(TrainerCallback):
    ends = []
    def on_step_end(self, *args, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

rows = [json.loads(line) for line in open(job["rows"])]
args = SFTConfig(
    output_dir=job["out"], max_length=job["length"], per_device_train_batch_size=job["batch"], max_steps=job["steps"],
    bf16=job["bf16"], use_cpu=not torch.cuda.is_available(), gradient_checkpointing=False, learning_rate=1e-4,
    lr_scheduler_type="constant", report_to="none", save_strategy="no", logging_steps=1, seed=1, packing=False,
    dataset_text_field="text", disable_tqdm=True, ddp_find_unused_parameters=False,
    model_init_kwargs={"attn_implementation": "sdpa", "dtype": "bfloat16" if job["bf16"] else "float32"},
)
statm = open("/proc/self/statm").read().split()
baseline = int(statm[1]) * os.sysconf("SC_PAGE_SIZE")
trainer = SFTTrainer(
    model=job["model"], args=args, train_dataset=Dataset.from_list(rows), callbacks=[Clock()],
    processing_class=AutoTokenizer.from_pretrained(job["model"]),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=job["targets"], task_type="CAUSAL_LM"),
)
trainer.train()
ends = Clock.ends[job["warm_up"]:]
steps = [b - a for a, b in zip(ends, ends[1:])]
cuda = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
if os.environ.get("RANK", "0") == "0":
    losses = [h["loss"] for h in trainer.state.log_history if "loss" in h]
    print("RESULT " + json.dumps({"steps": steps, "memory": cuda or rss - baseline, "losses": losses}))
"""


def compare_python() -> str:
    """The interpreter that has TRL: this environment's packages with a few more on top."""
    folder = ROOT / ".cache" / "compare"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        packages = next((folder / "lib").glob("python*/site-packages"))
        below = [path for path in sys.path if path.endswith("site-packages")]  # pip, which finds no torch, brings one
        (packages / "below.pth").write_text("\n".join(below) + "\n")
    if subprocess.run([python, "-c", "import trl"], capture_output=True).returncode:
        wanted = ["trl==1.16.0", "accelerate", "datasets>=4.7"]
        subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
    return str(python)


def make_inputs(folder: Path, length: int, rows: int) -> None:
    """A model of random weights with a tokenizer, and rows that all fill the length."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from contracts.job_config import JobConfig
    from finetune.rows import load_tokenizer

    tokenizer = load_tokenizer(JobConfig(tokenizer_name="builtin:bytes"))
    shape = LlamaConfig(**SHAPE, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    texts = [" ".join(f"{n} + {m} = {n + m}." for m in range(length)) for n in range(rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def launch(python: str, ranks: int, words: list[str]) -> str:
    """Run to the end on so many ranks, one thread each; returns standard output."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    head = [python, *(torchrun if ranks > 1 else [])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*head, *words], env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode and "RESULT " not in done.stdout:  # TRL's ranks sometimes abort at exit, the work done
        raise SystemExit(f"{' '.join(words[:2])} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def fly_trl(python: str, ranks: int, job: dict[str, object], folder: Path) -> dict[str, float]:
    """One run of TRL."""
    script = folder / "trl_run.py"
    script.write_text(TRL)
    out = launch(python, ranks, [str(script), json.dumps(job)])
    found = json.loads(out.split("RESULT ", 1)[1].splitlines()[0])
    return summary(found["steps"], found["memory"], found["losses"][-1])


def summary(steps: list[float], memory: float, loss: float) -> dict[str, float]:
    """Median and best step: on a busy host the best is what the code takes, the median what one gets."""
    return {"step": statistics.median(steps), "best": min(steps), "memory": memory, "loss": loss}


def fly_ours(ranks: int, job: dict[str, object], folder: Path) -> dict[str, float]:
    """One run of the job that ships."""
    out = folder / "ours"
    settings = {
        "model_name_or_path": job["model"], "dataset_name": job["rows"], "max_length": job["length"],
        "per_device_train_batch_size": job["batch"], "max_steps": job["steps"], "bf16": job["bf16"], "seed": 1,
        "use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": job["targets"], "fsdp": False,
        "learning_rate": 1e-4, "lr_scheduler_type": "constant", "save_strategy": "no", "profile_steps": 0,
        "output_dir": str(out),
    }  # fmt: skip
    config = folder / "ours.yaml"
    config.write_text(json.dumps(settings))
    subprocess.run(["rm", "-rf", str(out)], check=True)
    launch(sys.executable, ranks, ["-m", "finetune.train", "--config", str(config)])
    record = json.loads((out / "run.json").read_text())
    found = record["measured"]
    # Resident as TRL's is, with what the allocator keeps: memory_bytes is without.
    memory = found["memory_bytes"] if found["memory_counts"] == "cuda" else found["rss_growth_bytes"]
    return summary(record["step_seconds"][WARM_UP:], memory, record["loss"]["last"])


def interval(theirs: list[float], ours: list[float], draws: int = 10_000) -> tuple[float, float]:
    """Of the ratio of medians: 95 % of it over rounds drawn again, each with both its runs."""
    drawn = random.Random(1)
    pairs = list(zip(theirs, ours, strict=True))
    ratios = []
    for _ in range(draws):
        again = drawn.choices(pairs, k=len(pairs))
        ratios.append(statistics.median(t for t, _ in again) / statistics.median(o for _, o in again))
    edges = statistics.quantiles(ratios, n=40)
    return edges[0], edges[-1]


def main() -> None:
    """Take turns and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    folder = ROOT / ".cache" / "compare-run"
    folder.mkdir(parents=True, exist_ok=True)
    make_inputs(folder, args.length, rows=args.batch * 8 * max(args.ranks))
    job = {
        "model": str(folder / "model"), "rows": str(folder / "train.jsonl"), "out": str(folder / "trl"),
        "length": args.length, "batch": args.batch, "steps": args.steps, "bf16": args.bf16, "warm_up": WARM_UP,
        "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }  # fmt: skip
    python = compare_python()
    print("| ranks | engine | tokens/s | median step, s | best step, s | peak memory over the interpreter, MiB |")
    print("|---|---|---|---|---|---|")
    for ranks in args.ranks:
        runs: dict[str, list[dict[str, float]]] = {"TRL": [], "ours": []}
        for _ in range(args.rounds):
            runs["TRL"].append(fly_trl(python, ranks, job, folder))
            runs["ours"].append(fly_ours(ranks, job, folder))
        typical = {
            name: {key: statistics.median(one[key] for one in got) for key in ("step", "best", "memory")}
            for name, got in runs.items()
        }
        tokens = args.batch * args.length * ranks
        for name, one in typical.items():
            cells = [ranks, name, f"{tokens / one['step']:.0f}", f"{one['step']:.3f}", f"{one['best']:.3f}"]
            print(f"| {' | '.join(map(str, cells))} | {one['memory'] / 2**20:.0f} |")
        speed = typical["TRL"]["step"] / typical["ours"]["step"]
        memory = typical["ours"]["memory"] / typical["TRL"]["memory"]
        low, high = interval(*([one["step"] for one in runs[name]] for name in ("TRL", "ours")))
        least, most = interval(*([one["memory"] for one in runs[name]] for name in ("ours", "TRL")))
        print(f"\n{ranks} ranks, {args.rounds} rounds: ours {speed:.2f} x TRL's tokens/s ({low:.2f} to {high:.2f}),")
        print(f"{memory:.3f} x its memory ({least:.3f} to {most:.3f});")
        print(f"last losses {runs['TRL'][-1]['loss']:.4f} and {runs['ours'][-1]['loss']:.4f}\n")


if __name__ == "__main__":
    main()
