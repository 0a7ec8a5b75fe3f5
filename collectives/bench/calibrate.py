"""Calibration: the time of GEMMs in the model's shapes and of one model layer on this device.

Surface: torch on CPU or CUDA, in child processes, so that the resident agent never loads it. As many copies run at once
as the job has ranks on the host, because ranks share its cores and memory; the slowest counts. The result is the JSON
that `planner.forecast.calibration.parse_calibration` reads.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectives.bench import processes

_REPEAT_SECONDS = 1.5  # per shape: enough for a median of several, with about a minute in total
_SHAPES = 4  # number of timed shapes: two GEMMs, a layer's forward pass, and the whole layer
_MAX_REPEATS = 200
STARTUP_SECONDS = 60.0  # added to the budget, to import torch in each copy: 5 s if idle, 20 to 30 s if busy


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """What to measure: the shape of one layer, and how ranks share the host."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int  # per micro-batch
    sequence: int
    precision: str = "fp32"  # "fp32", "bf16", "fp16"
    device: str = "cpu"  # or "cuda"
    copies: int = 1  # ranks on this host
    threads: int | None = None  # CPU threads per rank; None: the host's cores divided by the copies
    method: str = "full"
    budget_seconds: float = 90.0  # for measurements; a short budget gives fewer repeats


class CalibrationFailedError(RuntimeError):
    """The child could not measure, or was stopped; the message contains its last output."""


def calibrate(request: CalibrationRequest, *, stop: threading.Event | None = None) -> dict[str, Any]:
    """Run the copies at the same time and return the result of the slowest one, for which the others would wait."""
    timeout_seconds = STARTUP_SECONDS + request.budget_seconds
    until = time.monotonic() + timeout_seconds
    answers: list[dict[str, Any]] = []
    trees: list[processes.Tree] = []
    with processes.run_folder() as folder:
        (folder / "request.json").write_text(json.dumps(asdict(request)))
        try:
            for index in range(request.copies):  # start all before waiting for any
                hidden = {"CUDA_VISIBLE_DEVICES": str(index)} if request.device == "cuda" else {}
                command = [sys.executable, "-m", "collectives.bench.calibrate", str(folder), str(index)]
                with (folder / f"{index}.log").open("wb") as stream:
                    trees.append(processes.Tree(command, {**os.environ, **hidden}, stream))
            for index, tree in enumerate(trees):
                ended = tree.wait(until, stop or threading.Event())
                if ended == "stopped":
                    raise CalibrationFailedError("stopped before it was done")
                if ended == "late" or tree.process.returncode != 0:
                    reason = f"not done {timeout_seconds:g} s after its start: the shapes need a larger budget"
                    last = (folder / f"{index}.log").read_text(errors="replace").strip().rpartition("\n")[2]
                    cause = reason if ended else last or f"exit code {tree.process.returncode}"
                    raise CalibrationFailedError(f"calibration on {request.device}: {cause}")
                answers.append(json.loads((folder / f"{index}.json").read_text()))
        finally:
            for tree in trees:
                tree.end(0.0)
    return max(answers, key=lambda a: a["layer"]["forward_seconds"] + a["layer"]["backward_seconds"])


def _median_seconds(run: Callable[[], object], wait: Callable[[], None], repeat_seconds: float) -> float:
    run()
    wait()
    seconds: list[float] = []
    end = time.perf_counter() + repeat_seconds
    while len(seconds) < 3 or (time.perf_counter() < end and len(seconds) < _MAX_REPEATS):
        start = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - start)
    from statistics import median  # also imports decimal and random, which the starting process does not need

    return median(seconds)


def _layer(torch: Any, request: CalibrationRequest, dtype: Any) -> Any:
    nn, functional = torch.nn, torch.nn.functional
    h, d = request.hidden, request.head_dim
    q, kv = request.heads * d, request.kv_heads * d

    class Layer(nn.Module):  # type: ignore[misc, name-defined]
        """Pre-norm attention and SwiGLU, as in Llama."""

        def __init__(self) -> None:
            super().__init__()
            sizes = {"q": (h, q), "k": (h, kv), "v": (h, kv), "o": (q, h), "gate": (h, request.ffn),
                     "up": (h, request.ffn), "down": (request.ffn, h)}  # fmt: skip
            for name, (into, out) in sizes.items():
                self.add_module(name, nn.Linear(into, out, bias=False))
            self.one, self.two = nn.RMSNorm(h), nn.RMSNorm(h)

        def forward(self, x: Any) -> Any:
            b, s, _ = x.shape
            n = self.one(x)
            query = self.q(n).view(b, s, request.heads, d).transpose(1, 2)
            key = self.k(n).view(b, s, request.kv_heads, d).transpose(1, 2)
            value = self.v(n).view(b, s, request.kv_heads, d).transpose(1, 2)
            grouped = request.heads != request.kv_heads
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            x = x + self.o(mixed.transpose(1, 2).reshape(b, s, q))
            n = self.two(x)
            return x + self.down(functional.silu(self.gate(n)) * self.up(n))

    return Layer().to(device=request.device, dtype=dtype)


def measure(request: CalibrationRequest) -> dict[str, Any]:
    """Measure in this process; needs torch."""
    import torch

    if request.device == "cpu":
        torch.set_num_threads(request.threads or max(1, (os.cpu_count() or 1) // request.copies))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[request.precision]
    wait: Callable[[], None] = torch.cuda.synchronize if request.device == "cuda" else lambda: None
    each = min(_REPEAT_SECONDS, request.budget_seconds / (2 * _SHAPES))  # half of the budget is for warm-up

    def rate(m: int, n: int, k: int) -> float:
        a = torch.randn(m, k, device=request.device, dtype=dtype)
        b = torch.randn(k, n, device=request.device, dtype=dtype)
        out = torch.empty(m, n, device=request.device, dtype=dtype)
        return 2.0 * m * n * k / _median_seconds(lambda: torch.mm(a, b, out=out), wait, each)

    gemm = max(rate(request.tokens, request.ffn, request.hidden), rate(request.tokens, request.hidden, request.ffn))
    layer = _layer(torch, request, dtype)
    if request.method != "full":
        layer.requires_grad_(False)
    batch = max(1, request.tokens // request.sequence)
    x = torch.randn(batch, request.sequence, request.hidden, device=request.device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(x)

    def both() -> None:
        layer(x).backward(gradient)
        layer.zero_grad(set_to_none=True)
        x.grad = None

    forward = _median_seconds(lambda: layer(x), wait, each)
    total = _median_seconds(both, wait, each)
    return {
        "schema_version": 1,
        "device": torch.cuda.get_device_name() if request.device == "cuda" else "CPU",
        "precision": request.precision,
        "gemm_flops_per_second": gemm,
        "layer": {
            "hidden": request.hidden, "ffn": request.ffn, "heads": request.heads, "kv_heads": request.kv_heads,
            "tokens": batch * request.sequence, "sequence": request.sequence, "forward_seconds": forward,
            "backward_seconds": max(total - forward, 0.05 * total), "method": request.method,
        },
        "taken_at_seconds": time.time(),
        "versions": [["torch", torch.__version__]],
    }  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Run the child process with the arguments FOLDER and N: read FOLDER/request.json and write FOLDER/N.json."""
    folder = Path(arguments[0])
    request = CalibrationRequest(**json.loads((folder / "request.json").read_text()))
    (folder / f"{arguments[1]}.json").write_text(json.dumps(measure(request)))


if __name__ == "__main__":
    main(sys.argv[1:])
