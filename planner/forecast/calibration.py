"""The uncertainty of a forecast: measurements from the machine itself, and the width of the 80 % interval.

A calibration is a JSON file written by `topoflight calibrate`. It replaces derived rates and makes the intervals
narrower. It is valid for one device and one precision, and is rejected for any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from contracts import bounded, plain
from contracts.finding import Interval
from contracts.layout import Layout
from contracts.plain import PlainError
from contracts.tables import read_table
from hardware.gpus import find_gpu
from planner.forecast.compute import Job
from planner.forecast.memory import SAFE_SHARE
from planner.forecast.models import read_model
from planner.forecast.specs import PlanError, TrainSpec

SCHEMA_VERSION = 1
_MAX_BYTES = 1 << 20


class CalibrationError(PlanError):
    """The calibration file is invalid; the message names the wrong part and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTiming:
    """Measured forward and backward time of one decoder layer of the model."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    tokens: int  # per micro-batch
    sequence: int
    forward_seconds: float
    backward_seconds: float
    method: str = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The measurements of a calibration file."""

    device: str  # "NVIDIA A40", "CPU: AMD EPYC 7B13"
    precision: str
    gemm_flops_per_second: float | None = None  # of the model's largest matrix multiplication
    layer: LayerTiming | None = None
    taken_at_seconds: float | None = None
    versions: tuple[tuple[str, str], ...] = ()
    schema_version: int = SCHEMA_VERSION


def parse_calibration(data: Any) -> Calibration:
    """Validate decoded JSON and build a calibration from it."""
    if not isinstance(data, dict):
        raise CalibrationError("calibration: must be a JSON object")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise CalibrationError(f"schema_version={data.get('schema_version')!r}: this version reads {SCHEMA_VERSION}")
    try:
        calibration = plain.read(data, Calibration)
    except plain.MisfitError as error:
        raise CalibrationError(f"calibration: {error}") from error
    for name, value in {**asdict(calibration), **(asdict(calibration.layer) if calibration.layer else {})}.items():
        if isinstance(value, int | float) and not 0 < value < 1e30:
            raise CalibrationError(f"{name}={value!r}: must be a positive number")
        if value == "":
            raise CalibrationError(f"{name}='': must be text")
    return calibration


def load_calibration(path: Path | str) -> Calibration:
    """Read a calibration file. Raises CalibrationError."""
    file = Path(path)
    try:
        data = plain.loads(bounded.read(file, _MAX_BYTES))
    except OSError as error:
        raise CalibrationError(f"{file}: {error.strerror}") from None
    except (bounded.TooLargeError, PlainError) as error:
        raise CalibrationError(f"{file}: {error}") from None
    return parse_calibration(data)


def check_device(calibration: Calibration, device: str, precision: str) -> None:
    """Raise CalibrationError if the calibration is for another device or precision."""
    gpu = find_gpu(calibration.device)
    name = gpu.name if gpu else calibration.device
    if name != device and not (device == "CPU" and name.startswith("CPU")):
        raise CalibrationError(f"calibration is of {calibration.device!r}, the job runs on {device!r}: calibrate there")
    if calibration.precision != precision:
        raise CalibrationError(f"calibration is for {calibration.precision}, the job computes in {precision}")


def apply_calibration(calibration: Calibration, job: Job) -> Job:
    """Replace derived rates by measured ones; the timing of a layer scales all rates by the same factor."""
    rates, inputs = job.rates, list[str]()
    if calibration.gemm_flops_per_second:
        ratio = calibration.gemm_flops_per_second / rates.gemm
        attention = rates.attention * ratio
        rates = replace(rates, gemm=calibration.gemm_flops_per_second, attention=attention, how="measured")
        inputs.append(f"GEMM {rates.gemm / 1e9:.4g} GFLOP/s on {calibration.device}: measured")
    if calibration.layer:
        timing = calibration.layer
        model = read_model({
            "model_type": "llama", "hidden_size": timing.hidden, "num_attention_heads": timing.heads,
            "num_key_value_heads": timing.kv_heads, "intermediate_size": timing.ffn, "num_hidden_layers": 1,
            "vocab_size": 32000,
        })  # fmt: skip
        train = TrainSpec(method="full", sequence_length=timing.sequence)  # without adapters
        one_layer = replace(job, model=model, train=train, rates=rates)
        cost = one_layer.layer(Layout(world_size=1), float(timing.tokens))
        took = timing.forward_seconds + timing.backward_seconds
        forward = cost.gemm + cost.attention + cost.elementwise
        back = cost.gemm * (2.0 if timing.method == "full" else 1.0) + cost.attention * 2.5 + cost.elementwise * 2.0
        if rates.device == "CPU":  # on a CPU, launch time adds to compute time, and depends only on Python
            ratio = (forward + back) / max(took - 2.7 * cost.host, 0.5 * took)
            launch = rates.launch_seconds
        else:
            ratio = (max(forward, cost.host) + max(back, 1.7 * cost.host)) / took
            launch = rates.launch_seconds / ratio
        rates = replace(rates, gemm=rates.gemm * ratio, attention=rates.attention * ratio, hbm=rates.hbm * ratio,
                        launch_seconds=launch, how="measured")  # fmt: skip
        inputs.append(
            f"layer forward {timing.forward_seconds:.4g} s, backward {timing.backward_seconds:.4g} s for "
            f"{timing.tokens} tokens: measured"
        )
    return replace(job, rates=replace(rates, inputs=tuple(inputs) or rates.inputs))


SIGMAS: Mapping[str, float] = read_table(__file__, "constants.toml")["sigmas"]  # for cases without published runs
Z80 = 1.2816  # standard deviations from the middle to each end of an 80 % interval

FILE = Path(__file__).with_name("intervals.json")
LONG_CONTEXT_TOKENS = 16384
LONG, MIXTURE, ADAPTERS, PLAIN = "long context", "mixture of experts", "adapters", "none of these"


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Standard deviations of log(measured / forecast) of published runs; written by `bench/forecast.py --write`."""

    kinds: dict[str, float]  # by kind of job, which decides the width of the step's interval
    calibrated: float  # after a step of the same stack was measured on the machine
    memory: dict[str, float]  # for the bytes on the fullest rank, by training method
    # For the difference between two forecasts of one job, whose common errors cancel: `pair` for layouts with different
    # degrees, `pair_same` for those that differ only in micro-batch, chunks or recomputation.
    pair: float
    pair_same: float


@cache
def widths() -> Widths:
    """Read the table in intervals.json."""
    return Widths(**json.loads(FILE.read_bytes()))


def kind_of(job: Job) -> str:
    """Return the kind of a job: the first of three properties that it has, from the widest interval to the narrowest.

    Forecasts without data for their GPU generation, or their stack, were as accurate as others (docs/decisions/0140).
    """
    marks = {
        LONG: job.train.sequence_length >= LONG_CONTEXT_TOKENS, MIXTURE: job.model.experts > 0,
        ADAPTERS: job.train.method != "full",
    }  # fmt: skip
    return next((name for name, holds in marks.items() if holds), PLAIN)


def memory_interval(job: Job, mid: float) -> Interval:
    """Return the 80 % interval of the memory on the fullest rank, from its forecast `mid` in bytes."""
    return interval(mid, widths().memory[job.train.method] if job.has_gpu else SIGMAS["memory_cpu"])


def bytes_that_fit(job: Job, capacity: float, *, surely: bool = True) -> float:
    """Return the largest forecast, in bytes, that fits a device of `capacity` bytes.

    If `surely`, the forecast's interval must end below the capacity. Otherwise it only has to begin below it.
    """
    if not job.has_gpu:
        return capacity * SAFE_SHARE
    around = memory_interval(job, capacity)
    return around.low if surely else around.high


def base_sigma(job: Job, *, calibrated: bool) -> float:
    """Return the standard deviation of log step time for the kind of job, if all link rates are known."""
    if job.rates.how == "assumed":
        return SIGMAS["assumed"]
    if job.rates.device == "CPU":
        return SIGMAS["calibrated_cpu"]
    sigma = widths().kinds[kind_of(job)]
    return min(widths().calibrated, sigma) if calibrated else sigma


def interval(mid: float, sigma: float, above: float | None = None) -> Interval:
    """Return the 80 % interval around the best estimate, by a factor to each side; `above`: sigma of the upper side."""
    low, high = math.exp(Z80 * sigma), math.exp(Z80 * (sigma if above is None else above))
    return Interval(low=mid / low, mid=mid, high=mid * high)
