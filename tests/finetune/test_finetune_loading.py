"""What loading takes of each rank's memory, and that an export is the model: real ranks on gloo."""

import pytest
import torch
from rigs.tables import ROOT, each_row, rows_of
from test_finetune_equivalence import HERE, run_script
from transformers import AutoModelForCausalLM, LlamaConfig

from contracts.job_config import ConfigError, JobConfig
from finetune.weights import open_source

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

RANKS = 4
MIB = 1 << 20
# Python's objects for the modules, process groups, opened files: without the weights, and alike for any size of them.
ROOM = 24 * MIB
CASES = rows_of(__file__)("cases")()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, forked_ranks):
    """A model of 200 MiB in fp32, 12 layers in files of 40 MB, and the report of each case."""
    folder = tmp_path_factory.mktemp("loading")
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=4096, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    model.save_pretrained(folder / "base", max_shard_size="40MB")
    assert len(list((folder / "base").glob("*.safetensors"))) > 3
    (folder / "base" / "model.fp16.safetensors").write_bytes(b"")  # of another precision: the index does not name it
    paths = f"{ROOT}:{HERE}"
    found, errors = run_script("loading_ranks.py", CASES, folder / "cases.json", RANKS, seconds=850, PYTHONPATH=paths)
    assert len(found) == len(CASES), errors[-3000:]
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    layer = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    ends = size - 12 * layer
    sizes = {"whole": size, "layer": layer, "ends": ends}
    return folder, {name: one["ranks"] for name, one in found.items()}, sizes


@each_row("name", ["FSDP full", "TP x FSDP", "PP x FSDP"])
def test_a_rank_takes_its_share_of_the_model_while_it_loads(loaded, name):
    """The whole would be four times as much. Under PP one stage has an end and the other has the other."""
    _, ranks, size = loaded
    assert size["whole"] > 180 * MIB
    for rank in ranks[name]:
        assert 0.8 * size["whole"] / RANKS < rank["loading"] < size["whole"] / RANKS + ROOM


def test_weights_become_4_bit_a_layer_at_a_time(loaded):
    """A rank's share of NF4 weights and of the ends, and in addition one layer's whole weights at a time."""
    _, ranks, size = loaded
    packed = 12 * size["layer"] / 8  # half a byte of four
    for rank in ranks["FSDP QLoRA"]:
        assert rank["loading"] < (packed + size["ends"]) / RANKS + size["layer"] / 8 + size["layer"] + ROOM


def test_a_full_fine_tune_is_exported_in_the_type_asked_for(loaded):
    """Transformers loads it as it is: the weights of the base, which nothing has trained."""
    folder, ranks, size = loaded
    exported = ranks["FSDP full"][0]["saved_model"]
    files = list((folder / exported).glob("*.safetensors"))
    assert sum(f.stat().st_size for f in files) == pytest.approx(size["whole"] / 2, rel=0.01)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16).eval()
    model, info = AutoModelForCausalLM.from_pretrained(exported, dtype="auto", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens).logits, base(tokens).logits, rtol=0, atol=0)


def test_a_merged_model_has_the_type_that_the_base_came_in(loaded):
    """Adapters that nothing has trained add nothing."""
    folder, ranks, _ = loaded
    base = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    merged = AutoModelForCausalLM.from_pretrained(ranks["TP x FSDP"][0]["merged"], dtype="auto").eval()
    assert merged.dtype == torch.float32
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, base(tokens).logits, rtol=0, atol=0)


def test_a_weight_that_the_files_lack_is_named(loaded):
    """Never drawn at random in its place."""
    config = JobConfig(model_name_or_path=str(loaded[0] / "base"))
    with pytest.raises(ConfigError, match=r"hold no model\.layers\.12\.input_layernorm\.weight"):
        open_source(config).read("model.layers.12.input_layernorm.weight")
