"""DeepSpeed: its traits, and its configuration JSON with transformers' "auto" values.

Surface: DeepSpeed's ZeRO stages and configuration JSON (deepspeed/runtime/zero/config.py).
"""

from __future__ import annotations

from contracts.layout import EIGHT_BITS, Layout
from contracts.tables import read_table
from planner.advice import ExportRequest, Formats, from_template, refuse
from planner.forecast.engine import Engine, Share, StateBytes, make_engine

# sub_group_size: ZeRO-3 updates this many weights at a time, each with an fp32 gradient (zero/config.py)
_SUB_GROUP = 1e9


class DeepSpeed(Engine):
    """In a step, ZeRO-1 and 2 cast all gradients of a rank to fp32, ZeRO-3 those of one group of weights."""

    def state_bytes(self, share: Share) -> StateBytes:
        """Add the optimizer's fp32 gradients, as many as exist at the same time."""
        stored = super().state_bytes(share)
        if share.zero < 3 or share.in_fp32 or share.train.optimizer != "adamw":
            return stored
        here = share.part(share.trained, share.routed_trained, sharded=True)
        return stored._replace(optimizer=12.0 + 4.0 * min(1.0, _SUB_GROUP / here))

    def host_load(self, file_bytes: float, layout: Layout, ranks: int) -> float:
        """Each rank reads the model; with zero.Init, one of its files at a time (transformers writes 5 GB each)."""
        return ranks * (min(file_bytes, 5e9) if layout.sharding == "zero3" else file_bytes)


ENGINE = make_engine(DeepSpeed(name="deepspeed"), read_table(__file__, "deepspeed.toml"))


def deepspeed_json(request: ExportRequest) -> str:
    """Export DeepSpeed's JSON; batch sizes are "auto", so that transformers inserts its own arguments."""
    layout = request.layout
    degrees = (("TP", layout.tp), ("PP", layout.pp), ("CP", layout.cp), ("EP", layout.ep))
    refuse("DeepSpeed", {
        **{f"{word}={degree}: ZeRO through transformers is data parallelism only": degree > 1
           for word, degree in degrees},
        f"HSDP {layout.dp_replicate} x {layout.dp_shard}: ZeRO shards over all ranks":
            layout.dp_replicate > 1 and layout.dp_shard > 1,
        f"{layout.precision} is not among its precisions": layout.precision in EIGHT_BITS,
        "reshard_after_forward=false: ZeRO-3 releases weights by its reuse distance":
            layout.sharding == "zero3" and not layout.reshard_after_forward and layout.dp_shard > 1,
    })  # fmt: skip
    stage = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[layout.sharding] if layout.dp_shard > 1 else 0
    return from_template("deepspeed.json", request, stage=stage)


FORMATS: Formats = {"deepspeed": deepspeed_json}
