"""Models and data sets by hub id, from a stand-in hub on loopback: trained, gated, moved, offline, gone, silent."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rigs.hub import Hub, silent
from rigs.tables import each_row
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
# Llama 3's shape of a talk, with a mark that stands nowhere else, so that a test sees whose template was used.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
JOB = {
    "use_peft": True, "lora_r": 4, "learning_rate": 1e-2, "max_length": 96, "per_device_train_batch_size": 4,
    "max_steps": 2, "save_strategy": "no", "profile_steps": 0, "logging_steps": 1, "completion_only_loss": True,
}  # fmt: skip
# Several jobs in one interpreter: to import torch and transformers takes longer than the training itself.
DRIVER = """
import json, os, sys, time
from finetune import train
for name, argv, env in json.load(sys.stdin):
    for key, value in env.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value
    print(f"=== {name}", file=sys.stderr, flush=True)
    began = time.monotonic()
    try:
        code = train.main(argv)
    except BaseException as error:
        import traceback
        traceback.print_exc()
        code = repr(error)
        if train.dist.is_initialized():
            train.dist.destroy_process_group()
    print("DONE " + json.dumps([name, code, time.monotonic() - began]), flush=True)
"""


def tokenizer_of(folder, unused=0):
    """Bytes, after so many tokens that stand nowhere; marks of a talk, of the beginning, and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [*(f"<|{n}|>" for n in range(unused)), *letters]
    special = ["<|begin|>", "<|endoftext|>", "<|eot|>", "<|user|>", "<|assistant|>"]
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*special, *letters])}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=special[0], eos_token=special[1])
    fast.add_special_tokens({"additional_special_tokens": special[2:]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def model_at(folder, shape, **more):
    """A random model with tokenizer, in shards."""
    size = tokenizer_of(folder)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(shape(vocab_size=size, **SMALL, **more))
    made.save_pretrained(folder, max_shard_size="40KB")
    return folder


def sums(count):
    """GSM8K's shape."""
    return [{"question": f"What is {a} + 2?", "answer": f"{a} + 2 = {a + 2}\n#### {a + 2}"} for a in range(count)]


def parquet(path, rows):
    """One file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The stand-in with models of each family and data sets as the real one has them."""
    folder = tmp_path_factory.mktemp("hub")
    made = Hub()
    made.add("models", "meta/tiny-llama", model_at(folder / "llama", LlamaConfig), tokens=("hf_good",))
    made.add("models", "mistral/tiny", model_at(folder / "mistral", MistralConfig, sliding_window=16))
    made.add("models", "qwen/tiny-2", model_at(folder / "qwen2", Qwen2Config))
    made.add("models", "qwen/tiny-3", model_at(folder / "qwen3", Qwen3Config, head_dim=8))
    moving = {"v1": model_at(folder / "moving", Qwen2Config)}
    moving["v2"] = model_at(folder / "moved", Qwen2Config, rms_norm_eps=1e-5)
    made.add("models", "own/moving", moving["v1"], branches=moving)
    (folder / "gpt2").mkdir()
    GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=259).save_pretrained(folder / "gpt2")
    tokenizer_of(folder / "gpt2")
    AutoModelForCausalLM.from_config(GPT2Config.from_pretrained(folder / "gpt2")).save_pretrained(folder / "gpt2")
    made.add("models", "openai/tiny-gpt", folder / "gpt2")
    custom = model_at(folder / "custom", LlamaConfig)
    (custom / "modeling_own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    config = json.loads((custom / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_own.X")}
    (custom / "config.json").write_text(json.dumps(config))
    made.add("models", "own/code", custom)
    tokenizer_of(folder / "wide", unused=50)
    made.add("models", "own/wide", folder / "wide")
    (folder / "empty").mkdir()
    (folder / "empty/README.md").write_text("nothing")
    made.add("models", "own/empty", folder / "empty")

    gsm = folder / "gsm8k"
    for part in ("main", "socratic"):
        parquet(gsm / part / "train-00000-of-00001.parquet", sums(32))
        parquet(gsm / part / "test-00000-of-00001.parquet", sums(8))
    (gsm / "README.md").write_text(
        "---\npretty_name: Sums --- in words\nconfigs:\n"
        + "".join(
            f"- config_name: {part}\n  data_files:\n  - split: train\n    path: {part}/train-*\n"
            f"  - split: test\n    path: {part}/test-*\n"
            for part in ("main", "socratic")
        )
        + "---\n"
    )
    other = folder / "gsm8k-v2"
    parquet(other / "main/train-0.parquet", sums(12))
    made.add("datasets", "openai/gsm8k", gsm, branches={"v2": other})
    made.moved["datasets", "gsm8k"] = "openai/gsm8k"
    talks = [[{"role": "user", "content": one["question"]}, {"role": "assistant", "content": one["answer"]}]
             for one in sums(12)]  # fmt: skip
    lines = folder / "talks"
    lines.mkdir()
    (lines / "train.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    made.add("datasets", "own/talks", lines)
    shapes = folder / "shapes"
    parquet(shapes / "conversation/train.parquet", [{"prompt": t[:1], "completion": t[1:]} for t in talks])
    parquet(shapes / "pairs/train.parquet", [{"prompt": t[0]["content"], "completion": t[1]["content"]} for t in talks])
    made.add("datasets", "own/shapes", shapes)
    (folder / "csv").mkdir()
    with (folder / "csv/data.csv").open("w") as table:
        writer = csv.DictWriter(table, ("question", "answer"))
        writer.writeheader()
        writer.writerows(sums(12))
    made.add("datasets", "own/csv", folder / "csv")
    (folder / "pictures").mkdir()
    (folder / "pictures/one.png").write_bytes(b"x")
    made.add("datasets", "own/pictures", folder / "pictures")
    yield made
    made.close()


def run_job(home, url, jobs, **environment):
    """Name -> (settings, environment) in one interpreter; returns name -> code, words, seconds, run."""
    listed = []
    for name, (settings, env) in jobs.items():
        config = home / f"{name}.yaml"
        config.write_text(json.dumps({**JOB, "output_dir": str(home / "out" / name), **settings}))
        listed.append([name, ["--config", str(config)], {"HF_TOKEN": None, **env}])
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "HF_ENDPOINT": url, "HF_HOME": str(home / "cache"), "no_proxy": "*", **environment,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], input=json.dumps(listed), capture_output=True, text=True, cwd=ROOT, env=env,
        timeout=1200,
    )  # fmt: skip
    (home / "log").write_text(done.stdout + done.stderr)
    words = {part.split("\n", 1)[0]: part for part in done.stderr.split("=== ")[1:]}
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("DONE "):
            name, code, seconds = json.loads(line.removeprefix("DONE "))
            record = home / "out" / name / "run.json"
            told = json.loads(record.read_text()) if record.exists() else None
            found[name] = (code, words[name].partition("finetune: ")[2] or words[name], seconds, told)
    assert len(found) == len(jobs), done.stderr[-3000:]
    return found


GSM = {"dataset_name": "openai/gsm8k", "dataset_config": "main"}
JOBS = yaml.safe_load((Path(__file__).with_name("jobs") / "hub.yaml").read_text())


def job_of(row):
    """Settings and environment."""
    return row["settings"], {"HF_TOKEN": row["token"]} if "token" in row else {}


GOOD = {name: job_of(row) for name, row in JOBS["good"].items()}
QWEN = {"model_name_or_path": "qwen/tiny-2"}
BAD = {n: (*job_of(row), row["words"]) for n, row in JOBS["bad"].items()}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Cache and outputs of the runs that reach the hub, and of the offline one after them."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def online(hub, home):
    """All that reach the hub; who may not read the gated one comes before its files are in the cache."""
    return run_job(home, hub.url, {**{name: one[:2] for name, one in BAD.items()}, **GOOD})


@each_row("name", GOOD)
def test_models_and_data_sets_of_a_hub_fly(online, name):
    """Every family, every shape of row, gated with its token, a moved name, a branch, parts, a CSV table."""
    code, words, _, record = online[name]
    assert code == 0, words[-3000:]
    assert (record["status"], record["steps_done"]) == ("complete", 2)
    rows = {"llama": 32}.get(name, 12)
    assert (record["data"]["rows"], record["data"]["dropped_rows"]) == (rows, 0)
    if name == "llama":
        assert len(record["eval_loss"]) == 1


def test_the_adapter_names_the_hub_s_model_and_keeps_its_template(online):
    """Base, revision and tokenizer are the hub's, not a folder of this machine's cache."""
    adapter = Path(online["llama"][3]["adapter"])
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "meta/tiny-llama"
    assert "<|eot|>" in (adapter / "chat_template.jinja").read_text()


@each_row("name", BAD)
def test_what_a_hub_refuses_is_said_in_one_line(online, name):
    """Which name, what is wrong, what is allowed; no stack trace."""
    code, words, _, _ = online[name]
    assert code == 2, words[-3000:]
    line = words.splitlines()[0]
    assert line.startswith("refused: ")
    assert [word for word in BAD[name][2] if word not in line] == [], line
    assert "Traceback" not in words


def test_code_of_a_model_never_runs(online, hub):
    """The file that the model's own code would have written is not there, and the code was not even asked for."""
    assert online["code in the folder"][0] == 2
    assert not any(path.endswith("/modeling_own.py") for path in hub.asked)
    assert not (hub.repositories["models", "own/code"].folder.parent / "ran").exists()


def test_offline_goes_on_from_the_cache_and_says_what_is_not_in_it(online, home, hub):
    """HF_HUB_OFFLINE=1 after a run: the same run without one request; what was never fetched is refused."""
    before = len(hub.asked)
    found = run_job(home, hub.url, {
        "llama-offline": GOOD["llama"],
        "qwen2-offline": GOOD["qwen2"],
        "pairs-offline": GOOD["pairs"],
        "never": ({**QWEN, "dataset_name": "own/pictures"}, {}),
        "socratic": ({**QWEN, **GSM, "dataset_config": "socratic"}, {}),
        "no model": ({"model_name_or_path": "meta/unseen", **GSM}, {}),
    }, HF_HUB_OFFLINE="1")  # fmt: skip
    assert len(hub.asked) == before
    for name in ("llama", "qwen2", "pairs"):
        code, words, _, record = found[f"{name}-offline"]
        assert code == 0, words[-3000:]
        assert record["loss"] == online[name][3]["loss"]
    for name, word in (("never", "own/pictures"), ("socratic", "openai/gsm8k"), ("no model", "meta/unseen")):
        code, words, _, _ = found[name]
        assert code == 2, words[-3000:]
        assert word in words.splitlines()[0]
    assert "HF_HUB_OFFLINE" in found["no model"][1].splitlines()[0]


def test_two_ranks_take_the_commit_that_the_first_was_told(online, home, hub):
    """FSDP over two ranks from the same hub: the loss of one rank alone, and one question for each id."""
    settings, env = GOOD["llama"]
    config = home / "ranks.yaml"
    layout = {"dp_shard": 2, "micro_batch": 2}
    settings = {**JOB, **settings, "per_device_train_batch_size": None, "layout": layout}
    config.write_text(json.dumps({**settings, "output_dir": str(home / "ranks")}))
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            "-m", "finetune.train", "--config", str(config)]  # fmt: skip
    before = len(hub.asked)
    done = subprocess.run(
        argv, capture_output=True, text=True, cwd=ROOT, timeout=900,
        env={**os.environ, **env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_ENDPOINT": hub.url,
             "HF_HOME": str(home / "cache"), "HF_HUB_OFFLINE": "0", "no_proxy": "*"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((home / "ranks/run.json").read_text())
    assert record["loss"] == pytest.approx(online["llama"][3]["loss"], rel=1e-5)
    named = [path for path in hub.asked[before:] if path.endswith("/revision/main")]
    # whether it is there at all, the model, and the data under the old name and today's: one rank's questions
    asked = [path.removeprefix("GET /api/").removesuffix("/revision/main") for path in named]
    assert sorted(asked) == ["datasets/gsm8k", "datasets/openai/gsm8k", *["models/meta/tiny-llama"] * 2]


def test_a_model_that_moved_is_not_mixed_into_a_checkpoint(online, home, hub):
    """main is another commit than the checkpoint's: refused with both; with the old one named the run goes on."""
    repository = hub.repositories["models", "own/moving"]
    settings = {**GOOD["moving"][0], "max_steps": 3, "output_dir": str(home / "out/moving")}
    was, now = (repository.at(name)[0] for name in ("v1", "v2"))
    before = json.loads((home / "out/moving/checkpoint-2/trainer.json").read_text())
    assert before["identity"]["base"] == f"commit {was}"
    repository.folder, folder = repository.branches["v2"], repository.folder
    try:
        found = run_job(home, hub.url, {"moving": (settings, {}), "named": ({**settings, "model_revision": was}, {})})
        refused = found["moving"]
        assert refused[0] == 2, refused[1][-3000:]
        line = refused[1].splitlines()[0]
        assert [word for word in (was, now, "own/moving", f"model_revision={was}") if word not in line] == [], line
    finally:
        repository.folder = folder
    code, words, *_ = found["named"]
    assert code == 0, words[-3000:]
    assert json.loads((home / "out/moving/run.json").read_text())["steps_done"] == 3


def test_no_token_is_written_anywhere(hub, tmp_path):
    """Refused (401), not let in (403) and let in: the log, debugging too, and every file of the run are without it."""
    tokens = {"401": "hf_RevokedRevokedRevokedRevokedRevoked", "403": "hf_StrangeStrangeStrangeStrangeStrange",
              "opened": "hf_OpenedOpenedOpenedOpenedOpenedOpen"}  # fmt: skip
    gated = hub.repositories["models", "meta/tiny-llama"]
    gated.tokens, before = (*gated.tokens, tokens["opened"]), gated.tokens
    hub.refused[tokens["401"]] = 401
    settings = {"model_name_or_path": "meta/tiny-llama", **GSM, "log_level": "debug"}
    try:
        jobs = {name: (settings, {"HF_TOKEN": token}) for name, token in tokens.items()}
        found = run_job(tmp_path, hub.url, jobs, HF_DEBUG="1")
    finally:
        gated.tokens = before
        del hub.refused[tokens["401"]]
    assert [found[name][0] for name in tokens] == [2, 2, 0]
    assert "401" in found["401"][1].splitlines()[0]
    assert "gated, and the token in HF_TOKEN" in found["403"][1].splitlines()[0]
    log = (tmp_path / "log").read_text()
    assert "/api/models/meta/tiny-llama" in log  # the requests themselves are in it
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / "out/opened/run.json" in files
    for name, token in tokens.items():
        assert [path for path in files if token.encode() in path.read_bytes()] == [], name


def test_a_hub_that_is_gone_or_fails_or_is_silent_ends_the_job_in_bounded_time(online, home, hub, tmp_path):
    """What the cache holds is trained; what it does not hold is refused, naming the hub; nothing waits without end."""
    listening, mute = silent()
    gone = "http://127.0.0.1:9"  # discard: nobody listens on a test machine
    hub.failing = 503
    try:
        for url, word, seconds in (
            (mute, "cannot be reached", "1"), (gone, "cannot be reached", "1"), (hub.url, "answered 503", "60"),
        ):  # fmt: skip
            found = run_job(tmp_path, url, {"new": ({**QWEN, **GSM}, {})}, HF_HUB_ETAG_TIMEOUT=seconds)
            code, words, _, _ = found["new"]
            assert code == 2, words[-3000:]
            assert word in words.splitlines()[0]
            assert url in words.splitlines()[0]
            print(word, found["new"][2])
        code, words, _, record = run_job(home, hub.url, {"llama-gone": GOOD["llama"]})["llama-gone"]
    finally:
        hub.failing = None
        listening.close()
    assert code == 0, words[-3000:]
    assert record["loss"] == online["llama"][3]["loss"]
    assert "answered 503: models and data come from the cache" in record["notes"][-1]
