"""NVIDIA NeMo AutoModel: its traits. Its own configuration is not exported.

Surface: FSDP2Config and BackendConfig (nemo_automodel/components, distributed/config.py and models/common/utils.py),
defaults where Transformer Engine and DeepEP are installed.
"""

from __future__ import annotations

from planner.advice import Formats
from planner.forecast.engine import IN_HALF, Fsdp

ENGINE = Fsdp(
    name="automodel",
    can=frozenset({"ddp", "zero3", "hsdp", "tp", "sp", "pp", "cp", "ep"}),
    eight_bits=("fp8", "mxfp8"),
    fused=True,  # attn, linear: te
    groups_experts=True,  # experts: torch_mm
    attention="flash3",
    states=IN_HALF,  # torch_dtype: bf16 (_transformers/auto_model.py); mp_policy reduces gradients in fp32
    adapter_bytes=2.0,  # lora_dtype: that of the weights
    fused_cross_entropy=False,
    logits_bytes=8.0,  # MaskedCrossEntropy in bf16: logits, log-softmax, and the gradients of both
    ends_apart=True,
    sends_tokens_once=True,  # dispatcher: deepep
)

FORMATS: Formats = {}
