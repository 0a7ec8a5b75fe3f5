"""Code that comes with a model is not run, whatever the model, the settings or the environment ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rigs.tables import each_row

from contracts.job_config import ConfigError, JobConfig, parse_config

pytestmark = pytest.mark.long  # imports torch

EVIL = "from pathlib import Path\nPath({mark!r}).write_text('ran')\nclass Evil: ...\n"


def model_folder(place: Path, model_type: str) -> tuple[Path, Path]:
    """A model folder that brings code of its own, and the file that this code would write."""
    folder, mark = place / "model", place / "mark"
    folder.mkdir()
    names = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil"] * 2}
    (folder / "config.json").write_text(json.dumps({
        "model_type": model_type, "architectures": ["Evil"], "auto_map": names, "trust_remote_code": True,
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "vocab_size": 64,
    }))  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": names, "tokenizer_class": "Evil"}))
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    return folder, mark


@each_row(("kind", "form"), [("evil", "random:{}"), ("evil", "{}"), ("llama", "random:{}")])
def test_a_model_that_brings_code_is_refused_or_built_from_the_library(kind: str, form: str, tmp_path: Path) -> None:
    """Of a type that transformers does not know the error names the setting; of one it knows it takes its own class."""
    from finetune.model import build_model

    folder, mark = model_folder(tmp_path, kind)
    config = JobConfig(model_name_or_path=form.format(folder))
    if kind == "evil":
        with pytest.raises(ConfigError, match="model_name_or_path"):
            build_model(config, "fp32")
    else:
        assert type(build_model(config, "fp32")).__module__.startswith("transformers.")
    assert not mark.exists()


def test_a_tokenizer_that_brings_code_is_not_run(tmp_path: Path) -> None:
    """Whatever comes of it, its code does not."""
    from finetune.rows import load_tokenizer

    folder, mark = model_folder(tmp_path, "evil")
    with pytest.raises((ValueError, OSError)):
        load_tokenizer(JobConfig(model_name_or_path=str(folder), tokenizer_name=str(folder)))
    assert not mark.exists()


def test_weights_are_never_unpickled(tmp_path: Path) -> None:
    """pytorch_model.bin is a pickle: a folder that holds nothing else holds no weights."""
    from finetune.weights import source_of

    folder, mark = model_folder(tmp_path, "llama")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n(X\x05\x00\x00\x00false\x85R.")
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        source_of(JobConfig(model_name_or_path=str(folder)))
    assert not mark.exists()


def test_the_setting_itself_is_refused() -> None:
    """`trust_remote_code: true` is an error, not a wish."""
    with pytest.raises(ConfigError, match="code from a model folder is not run"):
        parse_config({"trust_remote_code": True})
