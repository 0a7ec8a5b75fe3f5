"""Latent and linear attention, and mixtures of experts: weights, bytes and groups counted by hand."""

from __future__ import annotations

import pytest

from planner.forecast.specs import ModelSpec, weights

DEEPSEEK_V3 = ModelSpec(
    name="DeepSeek-V3", family="deepseek_v3", layers=61, hidden=7168, heads=128, kv_heads=128, head_dim=192, ffn=18432,
    vocab=129280, q_rank=1536, kv_rank=512, rope_dim=64, value_dim=128, experts=256, experts_per_token=8,
    expert_ffn=2048, shared_expert_ffn=2048, dense_layers=3,
)  # fmt: skip
QWEN3_NEXT = ModelSpec(
    name="Qwen3-Next-80B-A3B", family="qwen3_next", layers=48, hidden=2048, heads=16, kv_heads=2, head_dim=256,
    ffn=5120, vocab=151936, experts=512, experts_per_token=10, expert_ffn=512, shared_expert_ffn=512, linear_layers=36,
    linear_heads=32, linear_key_width=2048, linear_value_width=4096,
)  # fmt: skip
GPT_OSS = ModelSpec(
    name="gpt-oss-120b", family="gpt_oss", layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880,
    vocab=201088, attention_bias=True, experts=128, experts_per_token=4, expert_ffn=2880,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "billions"), [(DEEPSEEK_V3, 671.03), (QWEN3_NEXT, 79.67), (GPT_OSS, 116.83)], ids=lambda m: str(m)[:20]
)
def test_weights_are_those_that_the_makers_give(model: ModelSpec, billions: float) -> None:
    """arXiv 2412.19437 (671 B), arXiv 2508.10925 table 1 (116.83 B); of Qwen 3 Next what transformers builds."""
    assert weights(model).total / 1e9 == pytest.approx(billions, rel=1e-3)


def test_latent_attention_goes_through_its_ranks() -> None:
    """Down to 1536 and 512 + 64 columns, up to 128 heads of 192 and of 128 + 128, and out of 128 heads of 128."""
    by_hand = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert weights(DEEPSEEK_V3).attention_per_layer == by_hand
