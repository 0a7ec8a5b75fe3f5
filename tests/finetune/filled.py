"""A model with its weights in it, as one process alone holds it."""

import torch

from finetune.model import build_model
from finetune.weights import fill, open_source


def filled_model(config, precision="fp32", note=lambda _text: None):
    """Whole, on the CPU."""
    model = build_model(config, precision, note)
    fill(open_source(config), config.seed, model, torch.device("cpu"))
    return model
