"""The model: transformers' Llama, Mistral or Qwen, with LoRA by PEFT, cut into the chunks that stages run.

Surface: transformers `AutoModelForCausalLM`, `LlamaConfig`; PEFT `get_peft_model`. Module names are never changed,
so that a checkpoint of one layout loads into any other.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from contracts.job_config import ConfigError, JobConfig
from contracts.layout import Layout
from contracts.tables import read_table
from finetune import hub
from finetune.rows import IGNORED
from planner.forecast.models import ModelError, read_model
from planner.forecast.specs import TrainSpec
from planner.stacks import TOPOFLIGHT
from planner.stacks.limits import list_limits

BY_DOCUMENT = "by_document"
RANDOM = read_table(__file__, "random_models.toml")
ALONE = Layout(world_size=1)
LOSS_CHUNK = 1024  # tokens whose logits exist at a time under fused_cross_entropy


def build_model(
    config: JobConfig, precision: str, note: Callable[[str], None] = lambda _text: None, layout: Layout = ALONE
) -> Any:
    """The causal language model without values: parameters on meta (`weights.fill`), with LoRA if configured.

    Raises ConfigError for a model that this job cannot train under this layout.
    """
    from accelerate import init_empty_weights  # type: ignore[import-untyped, unused-ignore]
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    name = config.model_name_or_path
    if config.attn_implementation == "flash_attention_2":
        note("attn_implementation: flash_attention_2: torch's own flash attention is used")
    kernel = "eager" if config.attn_implementation == "eager" else BY_DOCUMENT
    folder = name.removeprefix("random:")
    if folder == name:
        shape: Any = _load(name, AutoConfig.from_pretrained, name, revision=config.model_revision)
    elif folder in RANDOM:
        shape = LlamaConfig(**RANDOM[folder], bos_token_id=0, eos_token_id=1, pad_token_id=2)
    elif os.path.isdir(folder):
        shape = _load(name, AutoConfig.from_pretrained, folder)
    else:
        raise ConfigError(f"model_name_or_path={name!r}: random: is {', '.join(RANDOM)} or a folder with config.json")
    _check_support(config, shape, layout)  # first: another architecture need not build with this job's attention
    with init_empty_weights(include_buffers=False):
        dtype = stored_type(config, precision)
        model = _load(name, AutoModelForCausalLM.from_config, shape, attn_implementation=kernel, dtype=dtype)
    model.tie_weights()  # on meta each of two tied modules has made its own
    model.config.use_cache = False
    if config.load_in_4bit:
        _into_four_bit(model, precision, note)
    return _add_lora(model, config) if config.use_peft else model


def _check_support(config: JobConfig, shape: Any, layout: Layout) -> None:
    """Refuse, by the rules of the planner, a transformers config or a layout that this job cannot train."""
    method: Any = "qlora" if config.load_in_4bit else "lora" if config.use_peft else "full"
    train = TrainSpec(method=method, attention=config.attn_implementation, sequence_length=config.max_length)
    try:
        reasons = list_limits(TOPOFLIGHT, read_model(shape.to_dict(), any_type=True), train, layout)
    except ModelError as error:
        reasons = [str(error)]
    if reasons:
        name = f"model_name_or_path={config.model_name_or_path!r}"
        raise ConfigError(f"{name}, layout {layout.family}: {'; '.join(reasons)}")


def stored_type(config: JobConfig, precision: str) -> torch.dtype:
    """In which weights lie in memory. Those that train: fp32; the layout's precision is what they compute in."""
    requested = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.dtype)
    if not config.use_peft:
        return torch.float32
    return requested or (torch.bfloat16 if precision == "bf16" else torch.float32)


def _load(name: str, load: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a loader of transformers without running code that comes with the model, whatever the model asks for."""
    with hub.explain_errors("model_name_or_path", name, options.get("revision")):
        return load(*arguments, trust_remote_code=False, **options)


def _into_four_bit(model: Any, precision: str, note: Callable[[str], None]) -> None:
    """Linear layers, but for the head, become those of bitsandbytes; `weights.fill` quantises."""
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("load_in_4bit=true: QLoRA needs bitsandbytes: pip install 'topoflight[qlora]'")
    if not torch.cuda.is_available():
        note("load_in_4bit: without a GPU 4-bit weights are unpacked by the CPU, which takes longer than it saves")
    # Stored in 16 bits, which FSDP gathers as they are in fp32 and in bf16: a cast would be another weight.
    quantiser = AutoHfQuantizer.from_config(
        BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
            bnb_4bit_quant_storage=torch.bfloat16,
        ),
        pre_quantized=False,
    )  # fmt: skip
    quantiser.preprocess_model(model, device_map=None)
    quantiser.postprocess_model(model)
    for module in model.modules():
        # On CPUs with AVX512-BF16 bitsandbytes would pack weights anew in the first evaluation, for a product that
        # has no gradient, and keep them so.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _add_lora(model: Any, config: JobConfig) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=config.lora_r, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout, task_type="CAUSAL_LM",
        target_modules=list(config.lora_target_modules),
        modules_to_save=list(config.lora_modules_to_save) or None,
    )  # fmt: skip
    try:
        return get_peft_model(model, lora, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"lora_target_modules={list(config.lora_target_modules)}: {error}") from None


def causal_lm(model: Any) -> Any:
    """The transformers model under PEFT, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class Chunk(nn.Module):  # type: ignore[misc, unused-ignore]
    """Consecutive layers, with the embedding or the head at an end: the whole model, or one pipeline stage.

    Takes tokens (first chunk) or hidden states; gives hidden states, or (last chunk) the summed loss.
    """

    def __init__(self, model: Any, first: bool, last: bool, numbers: range, fused_loss: bool) -> None:
        super().__init__()
        self.net = model
        self.first, self.last, self.fused_loss = first, last, fused_loss
        self.autocast: torch.dtype | None = None  # where nothing else casts the weights (FSDP does)
        lm = causal_lm(model)
        every = list(lm.model.layers)
        lm.model.layers = nn.ModuleList()
        for n in numbers:  # under the numbers that they have in the whole model
            lm.model.layers.add_module(str(n), every[n])
        # The layers keep the model's own config; only the loop over them reads this one.
        lm.model.config = copy.copy(lm.model.config)
        lm.model.config.num_hidden_layers = len(numbers)
        if getattr(lm.model.config, "layer_types", None):
            lm.model.config.layer_types = [lm.model.config.layer_types[n] for n in numbers]
        if not first:
            lm.model.embed_tokens = None
        if not last:
            lm.model.norm, lm.lm_head = nn.Identity(), None

    @property
    def layers(self) -> nn.ModuleList:
        """This chunk's layers."""
        return cast(nn.ModuleList, causal_lm(self.net).model.layers)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, packed: bool = False
    ) -> torch.Tensor:
        """Tokens or hidden states in; hidden states, or the summed loss as one number in a row, out."""
        lm = causal_lm(self.net)
        documents = find_documents(positions) if packed else None
        # Without autocast's cache, which would keep a copy of every fp32 weight until the forward pass has ended; no
        # weight is used twice in it.
        with torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False):
            kind = "input_ids" if self.first else "inputs_embeds"
            hidden: torch.Tensor = lm.model(
                **{kind: x}, position_ids=positions, use_cache=False, documents=documents
            ).last_hidden_state
            if not self.last:
                return hidden
            hidden, labels = hidden.flatten(0, 1), labels.flatten()
            # not a view of the sum, which FSDP warns of
            return torch.stack([self._fused_loss(hidden, labels) if self.fused_loss else self._loss(hidden, labels)])

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = causal_lm(self.net).lm_head(hidden).float()
        summed = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return cast(DTensor, summed).to_local() if isinstance(logits, DTensor) else summed

    def _fused_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The same with the logits of a part of the tokens at a time: no tensor has vocabulary x tokens."""
        head = causal_lm(self.net).lm_head
        plain = type(head) is nn.Linear and head.bias is None and not isinstance(head.weight, DTensor)
        here = hidden.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter, for tests
        if plain and here and importlib.util.find_spec("liger_kernel"):
            from liger_kernel.transformers import (  # type: ignore[import-not-found, unused-ignore]
                LigerFusedLinearCrossEntropyLoss,
            )

            summed: torch.Tensor = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")(
                head.weight, hidden, labels
            )
            return summed
        parts = zip(hidden.split(LOSS_CHUNK), labels.split(LOSS_CHUNK), strict=True)
        return torch.stack([checkpoint(self._loss, h, y, use_reentrant=False) for h, y in parts]).sum()


def cut(model: Any, bounds: Sequence[tuple[int, int]], stages: Sequence[int], fused_loss: bool) -> list[Chunk]:
    """This rank's chunks: `bounds` are all stages' first and one-past-last layers, `stages` those to keep."""
    # Of several chunks each has a copy of the modules with the same parameters; what no chunk keeps is freed.
    chunks = []
    for stage in stages:
        parameters = {id(p): p for p in model.parameters()}
        each = copy.deepcopy(model, parameters) if len(stages) > 1 else model
        chunks.append(Chunk(each, stage == 0, stage == len(bounds) - 1, range(*bounds[stage]), fused_loss))
    return chunks


# Attention inside documents: packed rows without a mask of tokens x tokens.
#
# Surface: transformers' `AttentionInterface`; torch's `varlen_attn` (flash attention over lengths) on a GPU in 16 bits,
# and `scaled_dot_product_attention` document by document elsewhere.


# Of a batch, its rows laid end to end: where each begins and the last one ends, int32 [documents + 1]; tokens of each.
Documents = tuple[torch.Tensor, list[int]]


def find_documents(positions: torch.Tensor) -> Documents:
    """Find the documents of rows, [rows, tokens]: each begins at position 0. Waits for the GPU."""
    starts = (positions.flatten() == 0).nonzero().flatten()
    bounds = functional.pad(starts, (0, 1), value=positions.numel()).int()
    return bounds, bounds.diff().tolist()


def attend(
    _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, *, dropout: float = 0.0,
    scaling: float | None = None, documents: Documents | None = None, **_more: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention of [rows, heads, tokens, head size], within documents where there are any.

    Returns [rows, tokens, heads, head size].
    """
    causal = partial(
        functional.scaled_dot_product_attention, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
    )
    if documents is None:
        return causal(query, key, value).transpose(1, 2), None
    rows, _, length, _ = query.shape
    bounds, lengths = documents
    if not dropout and _supports_varlen(query):
        flat = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        packed: torch.Tensor = varlen_attn(
            *flat, bounds, bounds, length, length, scale=scaling, window_size=(-1, 0), enable_gqa=True
        )
        return packed.unflatten(0, (rows, length)), None
    # split, whose gradient is one concatenation: slices would each add a gradient of the whole
    each = [tensor.transpose(0, 1).flatten(1, 2)[None].split(lengths, dim=2) for tensor in (query, key, value)]
    attended = torch.cat([causal(*parts) for parts in zip(*each, strict=True)], dim=2)[0].unflatten(1, (rows, length))
    return attended.permute(1, 2, 0, 3), None


def _supports_varlen(query: torch.Tensor) -> bool:
    """Return whether flash attention supports the query: an Ampere or later GPU, 16 bits, heads of at most 256."""
    fits = query.is_cuda and query.element_size() == 2 and query.shape[-1] <= 256
    return bool(fits and torch.cuda.get_device_capability(query.device) >= (8, 0))


ALL_ATTENTION_FUNCTIONS.register(BY_DOCUMENT, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(BY_DOCUMENT, lambda *_args, **_more: None)  # no mask is ever made
