"""What selective checkpointing keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.parallel import _checkpointed


class Products(TorchDispatchMode):
    """The inner dimensions of the matrix products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: list[int] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.mm.default:
            self.inner.append(args[1].shape[0])
        return op(*args, **(kwargs or {}))


def test_an_adapter_s_wide_output_is_made_again_and_other_products_are_kept():
    """With LoRA of rank 16, lora_B's output is as large as the frozen product's and costs little to compute."""
    x = torch.randn(8, 64, requires_grad=True)
    frozen, low, high = torch.randn(64, 96), torch.randn(64, 16), torch.randn(16, 96)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x @ frozen + (x @ low) @ high)

    with Products() as forward:
        result = _checkpointed(layer, "selective")(x).sum()
    with Products() as backward:
        result.backward()
    assert forward.inner == [64, 64, 16]
    # one product again, then the gradients of the three, whose inner dimensions are the widths of their outputs
    assert backward.inner == [16, 96, 16, 96]
