"""Weights are never unpickled. That code of a model is not run: tests/finetune/test_finetune_hub.py and _config.py."""

import json
from pathlib import Path

import pytest

from contracts.job_config import ConfigError, JobConfig


@pytest.mark.long  # imports torch
def test_weights_are_never_unpickled(tmp_path: Path) -> None:
    """pytorch_model.bin is a pickle: a folder that holds nothing else holds no weights."""
    from finetune.weights import source_of

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n(X\x05\x00\x00\x00false\x85R.")
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        source_of(JobConfig(model_name_or_path=str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04cposix\nsystem\n(X\x05\x00\x00\x00false\x85R.")
    with pytest.raises(ConfigError, match=r"/model\.safetensors: "):
        source_of(JobConfig(model_name_or_path=str(tmp_path)))
