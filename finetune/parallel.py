"""Apply the layout to the model: TP, activation checkpointing, FSDP2/HSDP or DDP; pipelines.

Surface: torch's DeviceMesh, `parallelize_module`, `fully_shard`, `DistributedDataParallel`,
`torch.distributed.pipelining`. The order is torchtitan's: each step wraps the result of the step before.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from contracts.layout import Layout
from finetune.model import Chunk, causal_lm, cut
from finetune.rows import Batch

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
Fill = Callable[..., None]  # gives values to the parameters of a chunk, or of a module of it: weights.fill


def stage_bounds(layout: Layout, layers: int) -> list[tuple[int, int]]:
    """First and one-past-last layer of each pipeline stage; where even is impossible the first stages take one more."""
    stages = layout.pp * layout.virtual_stages
    sizes = layout.stage_layers or [layers // stages + (n < layers % stages) for n in range(stages)]
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """tp innermost, pp outermost: neighbours in rank order share a node."""
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    return init_device_mesh(device.type, tuple(getattr(layout, name) for name in names), mesh_dim_names=names)


def parallelize(
    chunk: Chunk, layout: Layout, mesh: DeviceMesh | None, device: torch.device, fill: Fill = lambda *_: None
) -> nn.Module:
    """One chunk under the layout: TP, activation checkpointing, then FSDP2/HSDP or DDP.

    `fill` gives parameters their values once it is known which part of them this rank holds.
    """
    if mesh is not None and layout.tp > 1:
        apply_tp(chunk, mesh["tp"], layout.sequence_parallel)
    if layout.checkpointing == "full":
        for layer in chunk.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    low = torch.bfloat16 if layout.precision == "bf16" else None
    if mesh is None or layout.dp_shard == layout.tp == layout.pp == 1:
        _cast_as_used(chunk, low)
        fill(chunk, device)
        if {p.device for p in chunk.parameters()} != {device}:  # a chunk already on the device is unchanged
            chunk.to(device)
        if mesh is None:
            return chunk
        ids = [device.index] if device.type == "cuda" else None
        # Rotary frequencies are the only buffers, and every rank computes the same.
        return DistributedDataParallel(chunk, device_ids=ids, gradient_as_bucket_view=True, forward_sync_buffers=False)
    # Under TP or PP replicas, or a single copy, go through fully_shard too, on a mesh whose sharding dimension is 1:
    # autocast would leave the hidden states, and what is sent of them, in fp32.
    on_host = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    shard: Any = partial(
        fully_shard,
        mesh=mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else mesh["dp_shard"],
        reshard_after_forward=layout.reshard_after_forward and layout.sharding == "zero3",
        mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None),
        offload_policy=on_host if layout.offload == "all" else OffloadPolicy(),
    )
    lm = causal_lm(chunk.net)
    if chunk.first and not getattr(lm.config, "tie_word_embeddings", False):
        shard(lm.model.embed_tokens)
    for layer in chunk.layers:
        if getattr(lm, "is_loaded_in_4bit", False):  # quantised whole, then sharded: one layer at a time
            fill(chunk, device, layer)
        shard(layer)
    # The output head is the last to run and the first to run backward: gathered once.
    wrapped: nn.Module = shard(chunk, reshard_after_forward=False)
    fill(chunk, torch.device("cpu") if layout.offload == "all" else device)
    return wrapped


def _cast_as_used(chunk: Chunk, low: torch.dtype | None) -> None:
    """Autocast to `low`. PEFT then casts no inputs to fp32, the type of its weights: autocast would cast each back."""
    chunk.autocast = low
    for module in chunk.modules():
        if low is not None and hasattr(module, "lora_A"):
            module.cast_input_dtype_enabled = False


def apply_tp(chunk: Chunk, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split projections over the mesh: q, k, v, gate, up by column, o and down by row, LoRA's factors alike.

    If a weight is split by column, its lora_B is too; if it is split by row, its lora_A is too; the other factor
    stays whole. Embedding and output head split the vocabulary where nothing wraps them; the loss is made of the
    head's parts (torch's loss_parallel), so that no rank has the logits of the whole vocabulary.
    """
    tokens = Shard(1) if sequence_parallel else Replicate()
    for layer in chunk.layers:
        plan: dict[str, Any] = {}
        for path, module in layer.named_modules():
            projection = next((name for name in path.split(".") if name in COLUMN + ROW), None)
            whole_factor = "lora_A" if projection in COLUMN else "lora_B"
            if projection and isinstance(module, nn.Linear) and whole_factor not in path:
                by_row = parallel.RowwiseParallel(output_layouts=tokens)
                plan[path] = parallel.ColwiseParallel() if projection in COLUMN else by_row
        for name in ("q_norm", "k_norm"):  # Qwen 3's run on this rank's heads: their gradients are summed over ranks
            norm = getattr(layer.self_attn, name, None)
            if norm is not None and norm.weight.requires_grad:
                plan[f"self_attn.{name}"] = parallel.SequenceParallel(sequence_dim=2, use_local_output=True)
        if sequence_parallel:
            plan |= {
                "input_layernorm": parallel.SequenceParallel(use_local_output=True),
                "post_attention_layernorm": parallel.SequenceParallel(use_local_output=True),
                "self_attn": parallel.PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                ),
                "mlp": parallel.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }
        parallel.parallelize_module(layer, mesh, plan)
    lm = causal_lm(chunk.net)
    tied = getattr(lm.config, "tie_word_embeddings", False)
    ends: dict[str, Any] = {}
    if chunk.last and isinstance(lm.lm_head, nn.Linear):
        ends["lm_head"] = parallel.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    if chunk.last and sequence_parallel:  # the head and the loss take whole sequences
        gathered = parallel.PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        for style in (parallel.SequenceParallel(use_local_output=True), gathered):
            parallel.parallelize_module(lm.model.norm, mesh, style)
    if chunk.first and isinstance(lm.model.embed_tokens, nn.Embedding):
        ends["model.embed_tokens"] = parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
    parallel.parallelize_module(lm, mesh, ends)
    if tied and len(ends) == 2:
        lm.lm_head.weight = lm.model.embed_tokens.weight


class Engine:
    """The model under its layout; runs one global batch at a time, forward and backward."""

    def __init__(
        self, model: Any, layout: Layout, device: torch.device, mesh: DeviceMesh | None, fill: Fill = lambda *_: None
    ) -> None:
        self.layout, self.device = layout, device
        self.adapters = hasattr(model, "get_base_model")
        bounds = stage_bounds(layout, causal_lm(model).config.num_hidden_layers)
        pp_rank = mesh.get_local_rank("pp") if mesh is not None else 0
        self.pipeline = mesh.get_group("pp") if mesh is not None and layout.pp > 1 else None
        self.numbers = range(pp_rank, len(bounds), layout.pp)  # interleaved: rank r holds stages r, r + pp, ...
        self.width = causal_lm(model).config.hidden_size, causal_lm(model).dtype
        self.chunks = cut(model, bounds, self.numbers, layout.fused_cross_entropy)
        self.modules = [parallelize(chunk, layout, mesh, device, fill) for chunk in self.chunks]
        self.counts_loss = self.chunks[-1].last and (mesh is None or mesh.get_local_rank("tp") == 0)
        self.split_loss: Callable[[], Any] = parallel.loss_parallel if layout.tp > 1 else contextlib.nullcontext
        self.scale = 1.0
        self.schedule = self._build_schedule() if layout.pp > 1 else None
        self.shape: torch.Size | None = None  # of the micro-batches that the schedule is built for

    def _build_schedule(self, tokens: torch.Tensor | None = None) -> Any:
        """Return the schedule, for micro-batches of this shape.

        torch then does not run the model once more in the first step to find the shapes between stages.
        """
        stages, shapes, total = [], {}, self.layout.pp * self.layout.virtual_stages
        for number, chunk, module in zip(self.numbers, self.chunks, self.modules, strict=True):
            if tokens is not None:
                loss = torch.empty(1, device="meta", requires_grad=True)
                shapes = {
                    "input_args": tokens if chunk.first else self._make_stage_output(tokens),
                    "output_args": loss if chunk.last else self._make_stage_output(tokens),
                }
            stages.append(PipelineStage(module, number, total, self.device, group=self.pipeline, **shapes))
        options: Any = {
            "n_microbatches": self.layout.gradient_accumulation,
            "loss_fn": lambda out, _: out.sum() * self.scale,
            "scale_grads": False,
        }
        kind = SCHEDULES[self.layout.schedule]
        return kind(stages if kind is ScheduleInterleaved1F1B else stages[0], **options)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters under the names that they have in the whole model."""
        return {name.removeprefix("net."): p for chunk in self.chunks for name, p in chunk.named_parameters()}

    def train_step(self, batches: Sequence[Batch], counted: int) -> torch.Tensor:
        """Forward and backward; returns this rank's part of the mean loss per counted token.

        Gradients are those of the mean over the global batch: the wrappers average over ranks with other tokens, so
        the loss is scaled up by their number.
        """
        for module in self.modules:
            module.train()
        ranks = self.layout.data_parallel
        self.scale = ranks / max(1, counted)
        with self.split_loss():
            if self.schedule is not None:
                return self._run_pipeline(batches, "step") / ranks
            total = torch.zeros((), device=self.device)
            for number, batch in enumerate(batches):
                with self._sync(last=number == len(batches) - 1):
                    on = batch.to(self.device)
                    loss = self.modules[0](on.tokens, on.positions, on.labels, on.packed).sum()
                    (loss * self.scale).backward()
                total += loss.detach() / max(1, counted)
        return total if self.counts_loss else total * 0

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def eval_step(self, batches: Sequence[Batch]) -> torch.Tensor:
        """This rank's part of the summed loss."""
        for module in self.modules:
            module.eval()
        self.scale = 1.0
        with self.split_loss():
            if self.schedule is not None:
                return self._run_pipeline(batches, "eval")
            moved = [batch.to(self.device) for batch in batches]
            total = torch.stack([self.modules[0](b.tokens, b.positions, b.labels, b.packed).sum() for b in moved]).sum()
        return total if self.counts_loss else total * 0

    def _make_stage_output(self, tokens: torch.Tensor) -> torch.Tensor:
        """What one stage hands to the next: hidden states, split where sequence parallelism splits them."""
        width, stored = self.width
        low = torch.bfloat16 if self.layout.precision == "bf16" else stored
        length = tokens.shape[1] // (self.layout.tp if self.layout.sequence_parallel else 1)
        wrapped = isinstance(self.modules[0], FSDPModule)  # which casts inputs; autocast leaves the residual as it is
        return torch.empty(
            len(tokens), length, width, dtype=low if wrapped else stored, device="meta", requires_grad=True
        )

    def _run_pipeline(self, batches: Sequence[Batch], how: str) -> torch.Tensor:
        moved = [batch.to(self.device) for batch in batches]
        if moved[0].tokens.shape != self.shape:
            self.shape, self.schedule = moved[0].tokens.shape, self._build_schedule(moved[0].tokens)
        tokens, positions, labels = (
            torch.cat([getattr(b, n) for b in moved]) for n in ("tokens", "positions", "labels")
        )
        losses: list[torch.Tensor] | None = [] if self.chunks[-1].last else None
        getattr(self.schedule, how)(
            *((tokens,) if self.chunks[0].first else ()),
            target=labels if self.chunks[-1].last else None,
            losses=losses, positions=positions, labels=labels, packed=any(batch.packed for batch in moved),
        )  # fmt: skip
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)
        return total if self.counts_loss else total * 0

    def _sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients travel with the last micro-batch only, but for those of a whole sharded model.

        FSDP keeps gradients that it does not reduce unsharded, in the reduction's type (torch, `FSDPParam.
        to_accumulated_grad_if_needed`): little for adapters, four bytes for every weight of a full fine-tune. Those
        are scattered after each micro-batch; what HSDP reduces across replicas then still waits for the last. Weights
        that zero2 keeps gathered stay so from one micro-batch to the next: they change after the last only.
        """
        module = self.modules[0]
        if isinstance(module, DistributedDataParallel) and not last:
            return cast(contextlib.AbstractContextManager[None], module.no_sync())
        if isinstance(module, FSDPModule):
            scatters = last or (self.layout.dp_shard > 1 and not self.adapters)
            module.set_requires_gradient_sync(scatters)
            module.set_requires_all_reduce(last)
            module.set_is_last_backward(last)
            if not (self.layout.reshard_after_forward and self.layout.sharding == "zero3"):
                module.set_reshard_after_backward(last)
        return contextlib.nullcontext()
