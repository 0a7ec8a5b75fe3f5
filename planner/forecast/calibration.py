"""How sure a forecast is: numbers measured on the machine itself, and the width of the 80 % interval around it.

A calibration is a JSON file that `topoflight calibrate` writes. It replaces derived numbers and narrows the intervals.
It is of one device and one precision, and is refused for another.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from contracts import bounded, plain
from contracts.finding import Interval
from contracts.plain import PlainError
from hardware.gpus import gpu_named
from planner.forecast.compute import DEFAULT, Constants, Rates, layer_cost
from planner.forecast.engine import Engine
from planner.forecast.memory import DEFAULT_MEMORY
from planner.forecast.models import model_from_config
from planner.forecast.specs import ModelSpec
from planner.forecast.step_time import Job

SCHEMA_VERSION = 1
_MAX_BYTES = 1 << 20


class CalibrationError(ValueError):
    """A calibration file that cannot be used; the message says which part and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTiming:
    """One decoder layer of the model, timed forward and backward."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    tokens: int  # of the micro-batch
    sequence: int
    forward_seconds: float
    backward_seconds: float
    method: str = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured."""

    device: str  # "NVIDIA A40", "CPU: AMD EPYC 7B13"
    precision: str
    gemm_flops_per_second: float | None = None  # largest of the model's multiplications
    layer: LayerTiming | None = None
    taken_at_seconds: float | None = None
    versions: tuple[tuple[str, str], ...] = ()
    schema_version: int = SCHEMA_VERSION


def _check_numbers(value: Any, name: str) -> None:
    """Refuse numbers that are not positive."""
    if isinstance(value, dict):
        for key, member in value.items():
            _check_numbers(member, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for member in value:
            _check_numbers(member, name)
    elif isinstance(value, int | float) and not 0 < value < 1e30:
        raise CalibrationError(f"{name}={value!r}: must be a positive number")


def parse_calibration(data: Any) -> Calibration:
    """Check and build from decoded JSON."""
    if not isinstance(data, dict):
        raise CalibrationError("calibration: must be a JSON object")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise CalibrationError(f"schema_version={data.get('schema_version')!r}: this version reads {SCHEMA_VERSION}")
    _check_numbers(data, "")
    try:
        found = plain.read(data, Calibration)
    except plain.MisfitError as error:
        raise CalibrationError(f"calibration: {error}") from error
    for name in ("device", "precision"):
        if not getattr(found, name):
            raise CalibrationError(f"{name}='': must be text")
    return found


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


def _timed_model(timing: LayerTiming) -> ModelSpec:
    return model_from_config({
        "model_type": "llama", "hidden_size": timing.hidden, "num_attention_heads": timing.heads,
        "num_key_value_heads": timing.kv_heads, "intermediate_size": timing.ffn, "num_hidden_layers": 1,
        "vocab_size": 32000,
    })  # fmt: skip


def check_device(calibration: Calibration, device: str, precision: str) -> None:
    """Refuse a calibration of another device or precision."""
    known = gpu_named(calibration.device)
    name = known.name if known else calibration.device
    if name != device and not (device == "CPU" and name.startswith("CPU")):
        raise CalibrationError(f"calibration is of {calibration.device!r}, the job runs on {device!r}: calibrate there")
    if calibration.precision != precision:
        raise CalibrationError(f"calibration is for {calibration.precision}, the job computes in {precision}")


def apply_calibration(calibration: Calibration, rates: Rates, engine: Engine, constants: Constants = DEFAULT) -> Rates:
    """Rates with the measured ones in place of the derived; a layer's timing scales every rate alike."""
    inputs: list[str] = []
    if calibration.gemm_flops_per_second:
        ratio = calibration.gemm_flops_per_second / rates.gemm
        attention = rates.attention * ratio
        rates = replace(rates, gemm=calibration.gemm_flops_per_second, attention=attention, how="measured")
        inputs.append(f"GEMM {rates.gemm / 1e9:.4g} GFLOP/s on {calibration.device}: measured")
    if calibration.layer:
        timing = calibration.layer
        cost = layer_cost(
            _timed_model(timing), float(timing.tokens), float(timing.sequence), 1, False, rates, engine,
            constants=constants,
        )  # fmt: skip
        took = timing.forward_seconds + timing.backward_seconds
        forward = cost.gemm + cost.attention + cost.elementwise
        back = cost.gemm * (2.0 if timing.method == "full" else 1.0) + cost.attention * 2.5 + cost.elementwise * 2.0
        if rates.device == "CPU":  # starting operators adds to running them, and is Python's pace: not the arithmetic's
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
    return replace(rates, inputs=tuple(inputs) or rates.inputs)


# How wide the interval is, by the kind of job: learned from published runs that were left out of the fit. The numbers
# are in intervals.json, written by `python bench/forecast.py --write`.

# Standard deviations of log(measured / forecast) for which there are no published runs. An 80 % interval is 1.2816 of
# them to each side.
SIGMA_CALIBRATED_CPU = 0.25  # ranks share cores with each other and with others; docs/decisions/0023
SIGMA_ASSUMED = 0.55  # a CPU or a GPU without measurements
SIGMA_MEMORY_CPU = 0.25
Z80 = 1.2816
SIGMA_LINK_ASSUMED = 0.5  # of the speed of a network that was not measured
# Of PCIe between GPUs: 1.2 GB/s (8 L40S), 4.7 (4 L40S), 20 (2 L40S) and 25 (8 RTX PRO 6000) were measured, all of links
# of 32 GB/s and more (aws-samples and ai-dynamo/aiconfigurator).
SIGMA_PCIE_ASSUMED = 1.0

FILE = Path(__file__).with_name("intervals.json")
LONG_CONTEXT_TOKENS = 16384
UNSEEN_ENGINE, MIXTURE, ADAPTERS, LONG = (
    "engine of no published run", "mixture of experts", "adapters", "long context",
)  # fmt: skip
PLAIN = "none of these"


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Standard deviations of log(measured / forecast)."""

    engines: list[str] | set[str]  # of which published runs were scored
    kinds: dict[str, float]  # of jobs that are these and nothing else, names joined by "; "
    any_with: dict[str, float]  # of jobs that are one of these, whatever else they are
    calibrated: float  # once a step of the same stack was measured on the machine
    memory: dict[str, float]  # of the bytes on the fullest rank, by the method of training
    # Of the difference between two forecasts of one job, whose common errors cancel: of layouts that differ in their
    # degrees, and of those that differ in micro-batch, chunks or recomputation only.
    pair: float
    pair_same: float

    def sigma(self, kinds: tuple[str, ...]) -> float:
        """By the kind itself, else by the widest of what it is; where that is unknown too, by the widest there is.

        What is less known is forecast no better: no kind is narrower than one that has a part of its marks.
        """
        least = max((self.kinds.get(key_of(part), 0.0) for n in range(len(kinds)) for part in combinations(kinds, n)),
                    default=0.0)  # fmt: skip
        exact = self.kinds.get(key_of(kinds))
        if exact is None:
            widest = max(self.any_with.values())
            exact = max((self.any_with.get(kind, widest) for kind in kinds), default=widest)
        return max(exact, least)


def key_of(kinds: tuple[str, ...]) -> str:
    """The name of a combination."""
    return "; ".join(kinds) or PLAIN


@cache
def widths() -> Widths:
    """The table that ships."""
    return Widths(**json.loads(FILE.read_bytes()))


def kinds_of(job: Job, *, seen_engine: bool) -> tuple[str, ...]:
    """What sets a job apart from full training of a dense model by a stack of published runs.

    Not the GPU: 943 forecasts without any row of its generation erred no more than those with them.
    """
    marks = {
        UNSEEN_ENGINE: not seen_engine, MIXTURE: job.model.experts > 0, ADAPTERS: job.train.method != "full",
        LONG: job.train.sequence_length >= LONG_CONTEXT_TOKENS,
    }  # fmt: skip
    return tuple(name for name, holds in marks.items() if holds)


def memory_interval(job: Job, mid: float) -> Interval:
    """The 80 % interval of so many forecast bytes on the fullest rank."""
    return interval(mid, widths().memory[job.train.method] if job.has_gpu else SIGMA_MEMORY_CPU)


def bytes_that_fit(job: Job, capacity: float, *, surely: bool = True) -> float:
    """The most forecast bytes that fit a device of `capacity` bytes.

    Surely: the interval of the forecast ends below the capacity. Else it begins there, and a run may still fit.
    """
    if not job.has_gpu:
        return capacity * DEFAULT_MEMORY.safe_share
    around = memory_interval(job, capacity)
    return around.low if surely else around.high


def base_sigma(job: Job, *, calibrated: bool) -> float:
    """Uncertainty of log step time by the kind of job, all links known."""
    if job.rates.how == "assumed":
        return SIGMA_ASSUMED
    if job.rates.device == "CPU":
        return SIGMA_CALIBRATED_CPU
    table = widths()
    sigma = table.sigma(kinds_of(job, seen_engine=job.engine.name in table.engines))
    return min(table.calibrated, sigma) if calibrated else sigma


def interval(mid: float, sigma: float) -> Interval:
    """80 % around the best guess, as a factor to each side."""
    factor = math.exp(Z80 * sigma)
    return Interval(low=mid / factor, mid=mid, high=mid * factor)
