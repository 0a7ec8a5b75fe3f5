"""Weights are never unpickled, and the setting that would run a model's code is refused.

That such code is not run is in tests/finetune/test_finetune_hub.py, and of the source in test_static_rules.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contracts.job_config import ConfigError, JobConfig, parse_config


@pytest.mark.long  # imports torch
def test_weights_are_never_unpickled(tmp_path: Path) -> None:
    """pytorch_model.bin is a pickle: a folder that holds nothing else holds no weights."""
    from finetune.weights import source_of

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n(X\x05\x00\x00\x00false\x85R.")
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        source_of(JobConfig(model_name_or_path=str(tmp_path)))


def test_the_setting_itself_is_refused() -> None:
    """`trust_remote_code: true` is an error, not a wish."""
    with pytest.raises(ConfigError, match="code from a model folder is not run"):
        parse_config({"trust_remote_code": True})
