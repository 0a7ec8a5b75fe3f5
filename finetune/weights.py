"""Where weights come from, and into which shards they go: each rank reads the slices that it holds, and no others.

Surface: safetensors files with transformers' names, in a folder or of a hub.
Weights of `random:` models are drawn one at a time, from the seed and the weight's name, the same under every layout.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from contracts.job_config import ConfigError, JobConfig
from finetune import hub
from finetune.model import build_model

# What PEFT puts between a module and the weights that came with it, and the names of its own.
_WRAPPED = re.compile(r"(\.base_layer|\.original_module|\.modules_to_save\.default)+\.")
_FACTOR = re.compile(r"\.lora_(embedding_)?([AB])\.default")
Part = tuple[slice, ...]  # of a tensor, by dimension
WHOLE: Part = (slice(None),)


def open_source(config: JobConfig) -> Source:
    """The weights of the model that the settings name, as they are before adapters and 4 bits."""
    plain = build_model(dataclasses.replace(config, use_peft=False, load_in_4bit=False), "fp32")
    return Drawn(plain, config.seed) if config.model_name_or_path.startswith("random:") else Stored(config, plain)


class Stored:
    """Weights in safetensors files, by the names that transformers' model gives them."""

    def __init__(self, config: JobConfig, plain: Any) -> None:
        self.plain, self._named = plain, f"model_name_or_path={config.model_name_or_path!r}"
        self._file_of: dict[str, Any] = {}
        files = hub.download_weights(config.model_name_or_path, config.model_revision)
        for place in files:
            try:
                file: Any = safe_open(place, framework="pt")
                self._file_of |= dict.fromkeys(file.keys(), file)
            except (OSError, ValueError, SafetensorError) as error:
                raise ConfigError(f"{self._named}: {place}: {error}") from None
        name, first = next(iter(plain.named_parameters()))
        self.dtype = self.read(name, (slice(0, 0),) * first.ndim).dtype
        if (files[0].parent / "generation_config.json").is_file():
            plain.generation_config = GenerationConfig.from_pretrained(files[0].parent)

    def read(self, name: str, part: Part = WHOLE) -> torch.Tensor:
        """Read a part of a parameter. The file is mapped into memory, so that other parts take no memory."""
        if name not in self._file_of:
            raise ConfigError(f"{self._named}: its safetensors files hold no {name}")
        return cast(torch.Tensor, self._file_of[name].get_slice(name)[part])


class Drawn:
    """Weights that transformers would start a training from."""

    dtype = None

    def __init__(self, plain: Any, seed: int) -> None:
        self.plain, self.seed = plain, seed

    def read(self, name: str, part: Part = WHOLE) -> torch.Tensor:
        """Draw the whole parameter again for each call, and return a part of it."""
        path, _, key = name.rpartition(".")
        module = copy.deepcopy(self.plain.get_submodule(path)).to_empty(device="cpu").float()
        with torch.random.fork_rng(devices=()), torch.no_grad():
            torch.default_generator.manual_seed(_derive_seed(self.seed, f"{path}.{key}"))
            self.plain._init_weights(module)
        return module.get_parameter(key).detach()[part]


Source = Stored | Drawn


def fill(source: Source, seed: int, net: nn.Module, device: torch.device, within: nn.Module | None = None) -> None:
    """Give the parameters of `net` that are on meta a place on `device`, and this rank's part of their values.

    `within`: of one of its modules only. Parameters stay the objects that they are: optimizers, FSDP and tied modules
    hold them.
    """
    modules = set(within.modules()) if within is not None else None
    for path, module in net.named_modules():
        if modules is not None and module not in modules:
            continue
        for key, p in module._parameters.items():
            if p is None or not p.is_meta:
                continue
            name = f"{path}.{key}".removeprefix("net.").removeprefix("base_model.model.")
            plain_name = _WRAPPED.sub(".", name)  # in the model without adapters
            if plain_name == "lm_head.weight" and source.plain.config.tie_word_embeddings:
                plain_name = "model.embed_tokens.weight"
            if type(p).__name__ == "Params4bit":
                _quantise(p, module, source.read(plain_name), device)
                continue
            parameter = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
            torch.utils.swap_tensors(p, parameter)
            factor = _FACTOR.search(name)
            place(p, _draw_factor(factor, seed, p.shape).__getitem__ if factor else partial(source.read, plain_name))


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def place(p: torch.Tensor, read_part: Callable[[Part], torch.Tensor]) -> None:
    """Copy this rank's part of a value, which `read_part` returns. A rank without a part reads nothing."""
    local, offsets, sizes = p, torch.Size([0] * p.ndim), p.shape
    if isinstance(p, DTensor):
        (chunk,) = p.__create_chunk_list__()  # as torch.distributed.checkpoint asks for a rank's part
        local, offsets, sizes = p.to_local(), chunk.offsets, chunk.sizes
    if math.prod(sizes):
        local.copy_(read_part(tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)) or WHOLE))


def _quantise(p: Any, module: nn.Module, value: torch.Tensor, device: torch.device) -> None:
    """NF4 of one weight, on the device that keeps it; its scales are of the whole, so the whole is read."""
    module.weight = type(p)(
        value.to(device), requires_grad=False, compress_statistics=p.compress_statistics, quant_type=p.quant_type,
        quant_storage=p.quant_storage, blocksize=p.blocksize, module=module,
    ).to(device)  # fmt: skip


def _draw_factor(match: re.Match[str], seed: int, shape: Sequence[int]) -> torch.Tensor:
    """PEFT's own start of a LoRA factor: A as a linear layer's weights, B zero; of embeddings A zero and B normal."""
    embedding, letter = match.groups()
    values = torch.zeros(*shape)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(_derive_seed(seed, match.string))
        if embedding and letter == "B":
            return values.normal_()
        return values if embedding or letter == "B" else nn.init.kaiming_uniform_(values, a=math.sqrt(5))


def _derive_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1
