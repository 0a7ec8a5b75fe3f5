"""Models: names, config.json files and their errors; weights of every family against those that transformers builds."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rigs.tables import data_of, each_row, rows_of

from contracts.layout import Layout
from planner.advice import ExportError, ExportRequest
from planner.forecast import machines
from planner.forecast.compute import Job, cpu_rates
from planner.forecast.links import make_links
from planner.forecast.models import ModelError, model_named, read_model, read_model_file
from planner.forecast.specs import TrainSpec, lora_weights, weights
from planner.stacks import TOPOFLIGHT
from planner.stacks.exports import export

rows = rows_of(__file__)

# Every key may also be left out, and each family meets keys that only others have.
CHOICES: dict[str, list] = rows("choices")()  # fmt: skip


def odd_configs(family: str, count: int) -> list[dict]:
    """Small configurations, the same each time: all left out, then options drawn at random."""
    draw = random.Random(f"weights of {family}")
    least = {"model_type": family, "hidden_size": 256, "num_attention_heads": 32, "vocab_size": 96, "pad_token_id": 0}
    # One of each kind of key alone, then mixtures.
    configs = [{**least, "num_hidden_layers": 4}]
    configs += [{**least, "num_hidden_layers": 3, key: values[-1]} for key, values in CHOICES.items()]
    for _ in range(count):
        said = {key: draw.choice(values) for key, values in CHOICES.items() if draw.random() < 0.5}
        if {"num_experts", "n_routed_experts"} & said.keys():  # two names of one thing
            said.pop("num_local_experts", None)
        configs.append({**least, "num_hidden_layers": draw.randint(1, 4), **said})
    return configs


@pytest.mark.long
@pytest.mark.parametrize("family", rows("families")())
def test_the_weights_of_any_configuration_are_those_of_the_model_built_of_it(family: str, tmp_path: Path) -> None:
    """Read from the same config.json, as is; the model is built without memory."""
    torch = pytest.importorskip("torch", reason="the fine-tune extra is not installed")
    from transformers import AutoConfig, AutoModelForCausalLM

    for said in odd_configs(family, 8):
        (tmp_path / "config.json").write_text(json.dumps(said))
        spec, theirs = read_model_file(tmp_path), AutoConfig.from_pretrained(tmp_path)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(theirs)
        by_part = weights(spec)
        assert by_part.total == sum(p.numel() for p in built.parameters()), said
        layers = (built.transformer.h if family == "gpt2" else built.model.layers) if spec.layers else ()
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        assert by_part.all_layers == sum(sizes), said
        experts = [hasattr(getattr(layer, "mlp", None) or layer.feed_forward, "experts") for layer in layers]
        assert spec.layers - spec.dense_layers == (sum(experts) or spec.layers), said
        alike = [size for size, mixed in zip(sizes, experts, strict=True) if mixed or not any(experts)]
        assert by_part.layer in alike[:1] or not alike, said


DENSE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "gemma", "gemma2")
WINDOWLESS = ("llama", "gemma")  # whatever the file says
HALF = ("gemma2",)  # every other layer slides, the first one too, where no list says otherwise


@pytest.mark.long
@each_row("family", [*DENSE, "qwen2_moe", "qwen3_moe", "gpt_oss", "gemma3_text"])
def test_the_shape_and_the_layers_that_slide_are_what_transformers_says(family: str) -> None:
    """Qwen2-MoE: every other of the first; Qwen3-MoE: all; gpt-oss: every other; Gemma 3: five of six."""
    pytest.importorskip("torch", reason="the fine-tune extra is not installed")
    from transformers import AutoConfig

    windows = ({"sliding_window": 64, "use_sliding_window": True}, {"use_sliding_window": True, "max_window_layers": 4})
    for said in (*odd_configs(family, 8), *({**odd_configs(family, 0)[0], **more} for more in windows)):
        spec = read_model(said)
        theirs = AutoConfig.for_model(**said)
        kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * spec.layers
        window = None if family in WINDOWLESS else getattr(theirs, "sliding_window", None)
        sliding = kinds.count("sliding_attention") if window else 0
        assert spec.sliding_window == (window if sliding else None), said
        usual = -(-spec.layers // 2) if family in HALF else spec.layers
        assert not sliding or (spec.sliding_layers or usual) == sliding, said
        if family in DENSE:
            assert (spec.kv_heads, spec.ffn) == (theirs.num_key_value_heads, theirs.intermediate_size), said
            head = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
            assert (spec.head_dim, spec.tied_embeddings) == (head, theirs.tie_word_embeddings), said


# As model cards on the Hugging Face hub state them, or as the sizes of their safetensors add up, without the layers
# that predict further tokens.
@each_row(("name", "total"), rows("known"))
def test_known_names_have_the_published_number_of_weights(name: str, total: int) -> None:
    """The count is exact, so FLOPs and bytes start from the truth."""
    assert weights(model_named(name)).total == total


ON_THE_HUB = data_of(__file__, "models_on_the_hub.yaml")


@pytest.mark.long
@each_row("name", ON_THE_HUB)
def test_a_known_name_is_what_its_config_json_describes(name: str) -> None:
    """The table's row, the hub's config.json completed by transformers, and the model built of it."""
    torch = pytest.importorskip("torch", reason="the fine-tune extra is not installed")
    from transformers import AutoConfig, AutoModelForCausalLM

    said = ON_THE_HUB[name]
    text = said.get("text_config", said)
    theirs = AutoConfig.for_model(**{**text, "model_type": text["model_type"].replace("kimi_k2", "deepseek_v3")})
    spec = read_model({**theirs.to_dict(), **({"head_dim": None} if hasattr(theirs, "kv_lora_rank") else {})})
    known = model_named(name)
    assert replace(spec, name=name, max_positions=known.max_positions, rope_types=known.rope_types) == known
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(theirs)
    assert weights(known).total == sum(p.numel() for p in built.parameters())


def test_a_layer_without_experts_and_a_shared_expert_take_time() -> None:
    """A shared expert adds its multiplications; the mean over mixed layers lies between the two kinds."""
    base = model_named("Qwen3-30B-A3B")

    def seconds(**change: int) -> float:
        model = replace(base, ffn=12288, **change)
        train = TrainSpec(method="full", sequence_length=4096)
        links = make_links(machines.cluster("dgx-h100"))
        job = Job(model=model, train=train, links=links, engine=TOPOFLIGHT, rates=cpu_rates(4.0, None))
        return job.layer(Layout(world_size=1), 8192.0).gemm

    assert seconds(shared_expert_ffn=1536) > 1.1 * seconds()
    dense, sparse = seconds(experts=0), seconds()
    assert seconds(dense_layers=12) == pytest.approx(0.75 * sparse + 0.25 * dense)
    assert dense != pytest.approx(sparse, rel=0.05)


def test_adapters_go_to_experts_shared_experts_and_dense_layers() -> None:
    """Counted by hand: r x (in + out) for each matrix; 3 layers with experts, 1 without."""
    spec = read_model(rows("some_experts")())
    train = TrainSpec(lora_rank=2, lora_targets=("up_proj",))
    assert lora_weights(spec, train) == 2 * (3 * (5 * (64 + 30) + (64 + 70)) + (64 + 100))
    assert lora_weights(model_named("Llama-3.1-8B"), TrainSpec(lora_rank=16)) == 41_943_040  # as PEFT prints them


def test_megatron_is_told_the_same_shape_or_refuses() -> None:
    """Without their words, experts would be as wide as `ffn` and queries and keys not normalised."""
    layout, train = Layout(world_size=1), TrainSpec(method="full", engine="megatron")
    qwen = model_named("Qwen3-30B-A3B")
    words = export("megatron", ExportRequest(layout=layout, model=qwen, train=train)).splitlines()
    assert {"--qk-layernorm", "--moe-ffn-hidden-size 768", "--ffn-hidden-size 6144"} <= set(words)
    llama = model_named("Llama-3.1-8B")
    assert "--qk-layernorm" not in export("megatron", ExportRequest(layout=layout, model=llama, train=train))
    for odd, why in (
        (replace(qwen, dense_layers=1), "some of the layers"), (replace(qwen, shared_expert_ffn=768), "shared expert"),
        (replace(llama, mlp_bias=True), "biases"), (replace(llama, attention_bias=True), "biases"),
        (replace(llama, family="gemma"), "gemma models: this export supports"),
    ):  # fmt: skip
        with pytest.raises(ExportError, match=why):
            export("megatron", ExportRequest(layout=layout, model=odd, train=train))
    biased = ExportRequest(layout=layout, model=model_named("Qwen2.5-7B"), train=train)
    assert "--add-qkv-bias" in export("megatron", biased)


@each_row("named", ["0", [0.5], [True], {"0": 1}, [None]])
def test_dense_layers_that_are_no_list_of_numbers_are_refused(named: object) -> None:
    """The message names the key."""
    config = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    with pytest.raises(ModelError, match="mlp_only_layers"):
        read_model({**config, "vocab_size": 96, "mlp_only_layers": named})


LLAMA: dict = rows("llama")()


@each_row(("change", "says"), rows("broken"))
def test_broken_configs_name_the_key(change: dict[str, object], says: str) -> None:
    """The message names the key and its value."""
    with pytest.raises(ModelError, match=says):
        read_model({**LLAMA, **change})


def test_a_name_or_a_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    """A typing mistake is answered with the nearest names, garbage with the file's."""
    with pytest.raises(ModelError, match=r"Llama-3\.1-8B"):
        model_named("Llama-3.1-8C")
    assert model_named("qwen/qwen3-8b").hidden == model_named("Qwen3-8B").hidden
    (tmp_path / "config.json").write_text("{nope")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        read_model_file(tmp_path)


def test_quantised_weights_are_named() -> None:
    """By the method that config.json names; the model that they were made from has none."""
    quantised = {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert (read_model(quantised).quantised, read_model(LLAMA).quantised) == ("gptq", "")
