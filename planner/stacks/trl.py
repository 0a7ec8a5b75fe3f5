"""TRL and accelerate: their traits, accelerate's configuration file and TRL's YAML.

Surface: accelerate 1.15 ClusterConfig, FullyShardedDataParallelPlugin (FSDP2) and ParallelismConfig; transformers 5
TrainingArguments.
"""

from __future__ import annotations

from dataclasses import replace

from contracts.layout import EIGHT_BITS, Layout
from contracts.tables import read_table
from planner.advice import ExportRequest, Formats, refuse, yaml_from_template
from planner.forecast.engine import IN_HALF, Fsdp, Share, StateBytes, make_engine
from planner.forecast.models import hub_id
from planner.forecast.specs import TrainSpec


def _is_sharded(layout: Layout) -> bool:
    return layout.dp_shard > 1 and layout.sharding == "zero3"


def _is_wrapped(layout: Layout) -> bool:
    return _is_sharded(layout) or layout.tp > 1 or layout.cp > 1


def _is_loaded_in_half(train: TrainSpec, layout: Layout) -> bool:
    """Whether trained weights, gradients and AdamW's states use the two-byte type in which the model was loaded.

    FSDP converts trainable weights to fp32 (accelerate's fsdp2_prepare_model); nothing else changes their type. For
    fp16 the model must be loaded in fp32, because torch's GradScaler rejects fp16 gradients.
    """
    full = train.method == "full" and train.dtype != "float32"
    return full and layout.precision == "bf16" and not _is_wrapped(layout)


TILE = (4096.0, 32768.0)  # tokens and vocabulary entries whose logits exist at a time (TRL 1.16, kernels and utils.py)


class Trl(Fsdp):
    """accelerate's FSDP with fsdp_cpu_ram_efficient_loading: one rank reads the model and sends it to the others.

    Without FSDP, weights keep the type in which they were loaded.
    """

    def state_bytes(self, share: Share) -> StateBytes:
        """Return the bytes of the loaded type, or those of FSDP."""
        half = not share.in_fp32 and _is_loaded_in_half(share.train, share.layout)
        return Fsdp.state_bytes(replace(self, states=IN_HALF) if half else self, share)

    def loaded_bytes(self, share: Share) -> float:
        """Frozen weights keep the loaded type, even with FSDP."""
        return 4.0 if share.train.dtype == "float32" else super().loaded_bytes(share)

    def casts(self, share: Share) -> float:
        """Half-precision weights need no casts; of frozen weights of layers, autocast keeps those a product saved."""
        if share.adapters and share.train.dtype == "float32" and not (share.in_fp32 or self.in_units(share)):
            return 2.0 * (share.largest if share.layout.checkpointing == "full" else share.local - share.ends)
        return 0.0 if _is_loaded_in_half(share.train, share.layout) else super().casts(share)

    def stored_tensors(self, share: Share) -> tuple[float, float]:
        """Each adapter keeps an own half-precision input and its dropout's mask; each norm keeps an fp32 input.

        Counted with torch.autograd.graph.saved_tensors_hooks (TRL's lora_dropout is 0.05; masks as on a GPU, one byte).
        """
        targets, model = share.train.lora_targets, share.model
        if not share.adapters or share.in_fp32 or share.layout.compile or model.experts or not model.gated_mlp:
            return super().stored_tensors(share)
        down = "down_proj" in targets
        return 4.0 + 1.5 * (len(targets) - down), 3.0 + 1.5 * down

    def logits(self, share: Share) -> float:
        """One tile of logits and its weights; fp32 gradients of the head and its input (kernels/chunked_logprob.py).

        On a CPU torch folds the tile, with 29 more bytes per logit (fp32 on a GPU is counted likewise).
        """
        if not self.chunks_loss:
            return super().logits(share)
        rows, columns, model = min(share.tokens, TILE[0]), min(float(share.model.vocab), TILE[1]), share.model
        tile = rows * (share.element * TILE[1] + (29.0 * columns if share.in_fp32 else 0.0))
        trained = 0.0 if share.adapters and not share.whole else 4.0 * model.vocab * model.hidden
        return tile + 2.0 * columns * model.hidden + trained + 8.0 * share.tokens * model.hidden

    def reduced_bytes(self, train: TrainSpec, layout: Layout) -> float:
        """DDP's gradients have the type of their weights."""
        return 2.0 if _is_loaded_in_half(train, layout) else super().reduced_bytes(train, layout)

    def host_load(self, file_bytes: float, layout: Layout, ranks: int) -> float:
        """The full model is in the memory of one rank; without FSDP, of every rank."""
        return file_bytes if _is_sharded(layout) else file_bytes * ranks


ENGINE = make_engine(Trl(name="trl"), read_table(__file__, "trl.toml"))


def _list_refusals(request: ExportRequest) -> dict[str, bool]:
    layout = request.layout
    return {
        f"PP={layout.pp}: accelerate has no pipeline parallelism for training": layout.pp > 1,
        f"EP={layout.ep}: accelerate has no expert parallelism": layout.ep > 1,
        f"{layout.sharding}: FSDP2 shards weights too; use the deepspeed format":
            layout.sharding in ("zero1", "zero2") and layout.dp_shard > 1,
        "TP or CP with replication and no sharding: ParallelismConfig refuses it":
            (layout.tp > 1 or layout.cp > 1) and layout.dp_replicate > 1 and layout.dp_shard == 1,
        "offload=optimizer: FSDP2 offloads weights, gradients and optimizer together": layout.offload == "optimizer",
        f"{layout.precision} needs a recipe (te, ao or msamp) that this export does not choose":
            layout.precision in EIGHT_BITS,
        "FSDP without a GPU: accelerate silently runs DDP there": not request.on_gpu and _is_sharded(layout),
    }  # fmt: skip


def _get_dtype(request: ExportRequest) -> str:
    train, precision = request.train, request.layout.precision
    if train.dtype == "float32" or (train.method == "full" and precision == "fp16"):
        return "float32"
    return {"bf16": "bfloat16", "fp16": "float16"}.get(precision, "float32")


def accelerate_yaml(request: ExportRequest) -> str:
    """Export accelerate's default_config.yaml for one machine; machine_rank differs per machine."""
    refuse("accelerate", _list_refusals(request))
    return yaml_from_template("accelerate.yaml", request, wrapped=_is_wrapped(request.layout))


def trl_yaml(request: ExportRequest) -> str:
    """Export arguments for TRL's SFT script; launch it with the accelerate file if not only FSDP is used."""
    refuse("TRL", _list_refusals(request))
    name = hub_id(request.model.name) or request.model.name
    sharded = _is_sharded(request.layout)
    return yaml_from_template("trl.yaml", request, model_name=name, dtype=_get_dtype(request), sharded=sharded)


FORMATS: Formats = {"accelerate": accelerate_yaml, "trl": trl_yaml}
