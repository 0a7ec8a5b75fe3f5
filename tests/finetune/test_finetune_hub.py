"""Models and data sets by hub id, from a stand-in hub on loopback: trained, gated, moved, offline, gone, silent."""

import csv
import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from resident import free_port
from rigs.hub import Hub, parquet
from rigs.tables import ROOT, data_of, each_row
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from finetune.checkpoint import SaveError

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]
JOBS = data_of(__file__, "jobs/hub.yaml")
SMALL, JOB = JOBS["small"], JOBS["job"]
# Llama 3's shape of a talk, with a mark that is nowhere else, so that a test sees whose template was used.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# One interpreter for each hub and cache, as their variables are read while libraries are imported, which takes longer
# than the training itself. It runs the jobs of each line of standard input in forks, one fork for each rank.
DRIVER = """
import ctypes, json, os, subprocess, sys, traceback
import accelerate, peft, transformers.models.auto.modeling_auto, transformers.models.llama.modeling_llama
from finetune import train

def run(jobs, log):
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    for name, argv, env in jobs:
        if small := env.pop("SMALL_DISK", None):  # a mount that this fork alone sees
            assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS, sched.h
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", small], check=True)
        for key, value in env.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
        print(f"=== {name}", file=sys.stderr, flush=True)
        try:
            code = train.main(argv)
        except BaseException as error:
            traceback.print_exc()
            code = repr(error)
            if train.dist.is_initialized():
                train.dist.destroy_process_group()
        print("DONE " + json.dumps(code), file=sys.stderr, flush=True)

for line in sys.stdin:
    forks = []
    for jobs, log in json.loads(line):
        forks.append(os.fork())
        if not forks[-1]:
            try:
                run(jobs, log)
            finally:
                os._exit(0)
    for fork in forks:
        os.waitpid(fork, 0)
    print("OVER", flush=True)
"""


def tokenizer_of(folder, unused=0):
    """Bytes, after so many tokens that no text has; marks of a talk, of the beginning, and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [*(f"<|{n}|>" for n in range(unused)), *letters]
    special = ["<|begin|>", "<|endoftext|>", "<|eot|>", "<|user|>", "<|assistant|>"]
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*special, *letters])}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=special[0], eos_token=special[1])
    fast.add_special_tokens({"additional_special_tokens": special[2:]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def model_at(folder, shape, **more):
    """A random model with tokenizer, in shards that only the index names."""
    size = tokenizer_of(folder)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(shape(vocab_size=size, **SMALL, **more))
    made.save_pretrained(folder, max_shard_size="40KB")
    index = folder / "model.safetensors.index.json"
    for shard in folder.glob("model-*.safetensors"):
        shard.rename(folder / shard.name.replace("model-", "part-"))
    index.write_text(index.read_text().replace('"model-', '"part-'))
    return folder


def sums(count):
    """GSM8K's shape."""
    return [{"question": f"What is {a} + 2?", "answer": f"{a} + 2 = {a + 2}\n#### {a + 2}"} for a in range(count)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The stand-in with models of each family and data sets as the real one has them."""
    folder = tmp_path_factory.mktemp("hub")
    made = Hub()
    may_read = ("hf_good", TOKENS["opened"])
    made.refused[TOKENS["401"]] = 401
    made.add("models", "meta/tiny-llama", model_at(folder / "llama", LlamaConfig), tokens=may_read)
    made.add("models", "mistral/tiny", model_at(folder / "mistral", MistralConfig))
    made.add("models", "qwen/tiny-2", model_at(folder / "qwen2", Qwen2Config))
    made.add("models", "qwen/tiny-3", model_at(folder / "qwen3", Qwen3Config, head_dim=8))
    moving = {"v1": model_at(folder / "moving", Qwen2Config)}
    moving["v2"] = model_at(folder / "moved", Qwen2Config, rms_norm_eps=1e-5)
    made.add("models", "own/moving", moving["v1"], branches=moving)
    (folder / "gpt2").mkdir()
    GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=259).save_pretrained(folder / "gpt2")
    tokenizer_of(folder / "gpt2")
    transformers.AutoModelForCausalLM.from_config(GPT2Config.from_pretrained(folder / "gpt2")).save_pretrained(
        folder / "gpt2"
    )
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


class Driver:
    """An interpreter that runs jobs with the hub at `url` and the cache in `home`."""

    def __init__(self, home, url, **environment):
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1", "HF_ENDPOINT": url, "HF_HOME": str(home / "cache"), "no_proxy": "*", **environment,
        }  # fmt: skip
        self.home = home
        with (home / "driver").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                cwd=ROOT, env=env,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.communicate()

    def run(self, *forks):
        """Run forks at once, each its jobs, name -> (settings, environment), in order; name -> code, words, run."""
        told, found = [], {}
        for jobs in forks:
            listed = []
            for name, (settings, env) in jobs.items():
                config = self.home / f"{name}.yaml"
                config.write_text(json.dumps({**JOB, "output_dir": str(self.home / "out" / name), **settings}))
                listed.append([name, ["--config", str(config)], {"HF_TOKEN": None, **env}])
            told.append([listed, str(self.home / f"{next(iter(jobs))}.log")])
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "OVER\n", (self.home / "driver").read_text()[-3000:]
        for _, log in told:
            for part in re.split(r"^=== ", Path(log).read_text(), flags=re.MULTILINE)[1:]:
                name, _, words = part.partition("\n")
                words, _, code = words.rpartition("DONE ")
                out = json.loads((self.home / f"{name}.yaml").read_text())["output_dir"]
                run = json.loads((Path(out) / "run.json").read_text()) if (Path(out) / "run.json").exists() else None
                found[name] = (json.loads(code), words.partition("finetune: ")[2] or words, run)
        return found


GSM = {"dataset_name": "openai/gsm8k", "dataset_config": "main"}


def job_of(row):
    """Settings and environment."""
    return row["settings"], {"HF_TOKEN": row["token"]} if "token" in row else {}


GOOD = {name: job_of(row) for name, row in JOBS["good"].items()}
QWEN = {"model_name_or_path": "qwen/tiny-2"}
LLAMA = {"model_name_or_path": "meta/tiny-llama", **GSM}
TOKENS = {"401": "hf_RevokedRevokedRevokedRevokedRevoked", "403": "hf_StrangeStrangeStrangeStrangeStrange",
          "opened": "hf_OpenedOpenedOpenedOpenedOpenedOpen"}  # fmt: skip
BAD = {n: (*job_of(row), row["words"]) for n, row in JOBS["bad"].items()}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Cache and outputs of the runs that reach the hub, and of the offline one after them."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def driver(hub, home):
    """It reaches the hub, and writes all that huggingface_hub has to say."""
    with Driver(home, hub.url, HF_DEBUG="1") as made:
        yield made


@pytest.fixture(scope="module")
def online(driver):
    """All that reach the hub; who may not read the gated one comes before its files are in the cache."""
    secret = {name: ({**LLAMA, "log_level": "debug"}, {"HF_TOKEN": token}) for name, token in TOKENS.items()}
    opened = {"opened": secret.pop("opened")}
    return driver.run({**secret, **{name: one[:2] for name, one in BAD.items()}, **opened, **GOOD})


@each_row("name", GOOD)
def test_models_and_data_sets_of_a_hub_are_trained_on(online, name):
    """Every family, every shape of row, gated with its token, a moved name, a branch, parts, a CSV table."""
    code, words, record = online[name]
    assert code == 0, words[-3000:]
    assert (record["status"], record["steps_done"]) == ("complete", 2)
    rows = {"llama": 32}.get(name, 12)
    assert (record["data"]["rows"], record["data"]["dropped_rows"]) == (rows, 0)
    if name == "llama":
        assert len(record["eval_loss"]) == 1


def test_the_adapter_names_the_hub_s_model_and_keeps_its_template(online):
    """Base, revision and tokenizer are the hub's, not a folder of this machine's cache."""
    adapter = Path(online["llama"][2]["adapter"])
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "meta/tiny-llama"
    assert "<|eot|>" in (adapter / "chat_template.jinja").read_text()


@each_row("name", BAD)
def test_what_a_hub_refuses_is_said_in_one_line(online, name):
    """Which name, what is wrong, what is allowed; no stack trace."""
    code, words, _ = online[name]
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
    with Driver(home, hub.url, HF_HUB_OFFLINE="1") as cut_off:
        found = cut_off.run({
            "llama-offline": GOOD["llama"],
            "qwen2-offline": GOOD["qwen2"],
            "pairs-offline": GOOD["pairs"],
            "never": ({**QWEN, "dataset_name": "own/pictures"}, {}),
            "socratic": ({**QWEN, **GSM, "dataset_config": "socratic"}, {}),
            "no model": ({"model_name_or_path": "meta/unseen", **GSM}, {}),
        })  # fmt: skip
    assert len(hub.asked) == before
    for name in ("llama", "qwen2", "pairs"):
        code, words, record = found[f"{name}-offline"]
        assert code == 0, words[-3000:]
        assert record["loss"] == online[name][2]["loss"]
    for name, word in (("never", "own/pictures"), ("socratic", "openai/gsm8k"), ("no model", "meta/unseen")):
        code, words, _ = found[name]
        assert code == 2, words[-3000:]
        assert word in words.splitlines()[0]
    assert "HF_HUB_OFFLINE" in found["no model"][1].splitlines()[0]


def ranks_of_two(name, settings, *environments):
    """The forks of a job of two ranks, each with its environment."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    return [{f"{name}-{rank}": (settings, {**env, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)})}
            for rank, env in enumerate(environments)]  # fmt: skip


def test_all_ranks_use_the_commit_that_the_first_one_resolved(online, driver, home, hub):
    """FSDP over two ranks from the same hub: the loss of one rank alone, and one question for each id."""
    settings, env = GOOD["llama"]
    settings = {**settings, "per_device_train_batch_size": None, "layout": {"dp_shard": 2, "micro_batch": 2},
                "output_dir": str(home / "out/ranks")}  # fmt: skip
    before = len(hub.asked)
    found = driver.run(*ranks_of_two("rank", settings, env, env))
    assert [code for code, *_ in found.values()] == [0, 0], found["rank-0"][1][-3000:]
    assert found["rank-0"][2]["loss"] == pytest.approx(online["llama"][2]["loss"], rel=1e-5)
    named = [path for path in hub.asked[before:] if path.endswith("/revision/main")]
    # the model, again as its adapter is saved, and the data under the old name and today's: one rank's questions
    asked = [path.removeprefix("GET /api/").removesuffix("/revision/main") for path in named]
    assert sorted(asked) == ["datasets/gsm8k", "datasets/openai/gsm8k", *["models/meta/tiny-llama"] * 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_of_a_rank_is_the_reason_in_the_record(online, driver, home):
    """Rank 1 alone has no room for the model and alone knows it; rank 0 waits for it in a collective."""
    settings = {**GOOD["qwen2"][0], "layout": {"dp_shard": 2}, "output_dir": str(home / "out/full")}
    found = driver.run(*ranks_of_two("full", settings, {}, {"SMALL_DISK": str(home / "cache/hub")}))
    code, words, record = found["full-1"]
    assert (code, record["status"], record["exit_code"]) == (SaveError.code, "failed", SaveError.code), words[-3000:]
    assert record["reason"].startswith("rank 1 on ") and "No space left on device" in record["reason"]
    assert words.splitlines()[0] == f"failed: {record['reason']}"


def test_a_model_that_moved_is_not_mixed_into_a_checkpoint(online, driver, home, hub):
    """main is another commit than the checkpoint's: refused with both; with the old one named the run goes on."""
    repository = hub.repositories["models", "own/moving"]
    settings = {**GOOD["moving"][0], "max_steps": 3, "output_dir": str(home / "out/moving")}
    was, now = (repository.at(name)[0] for name in ("v1", "v2"))
    before = json.loads((home / "out/moving/checkpoint-2/trainer.json").read_text())
    assert before["identity"]["model_revision"] == was
    repository.folder, folder = repository.branches["v2"], repository.folder
    try:
        found = driver.run({"moving": (settings, {}), "named": ({**settings, "model_revision": was}, {})})
        refused = found["moving"]
        assert refused[0] == 2, refused[1][-3000:]
        line = refused[1].splitlines()[0]
        assert [word for word in (was, now, "model_revision") if word not in line] == [], line
    finally:
        repository.folder = folder
    code, words, *_ = found["named"]
    assert code == 0, words[-3000:]
    assert json.loads((home / "out/moving/run.json").read_text())["steps_done"] == 3


def test_no_token_is_written_anywhere(online, home):
    """Refused (401), not let in (403) and let in: the log, debugging too, and every file of the runs are without it."""
    assert [online[name][0] for name in TOKENS] == [2, 2, 0]
    assert "401" in online["401"][1].splitlines()[0]
    assert "gated" in online["403"][1].splitlines()[0]
    assert "/api/models/meta/tiny-llama" in (home / "401.log").read_text()  # the requests themselves are in it
    files = [path for path in home.rglob("*") if path.is_file()]
    assert {home / "out/opened/run.json", home / "401.log"} <= {*files}
    for name, token in TOKENS.items():
        assert [path for path in files if token.encode() in path.read_bytes()] == [], name


def test_a_hub_that_is_gone_or_fails_or_is_silent_ends_the_job_in_bounded_time(online, driver, hub, tmp_path):
    """What the cache holds is trained; what it does not hold is refused, naming the hub; nothing waits without end."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)  # takes connections and never says a word
    mute = f"http://127.0.0.1:{listening.getsockname()[1]}"
    new = ({"model_name_or_path": "meta/unseen", **GSM}, {})
    hub.failing = 503
    with ThreadPoolExecutor(1) as pool, Driver(tmp_path, mute, HF_HUB_ETAG_TIMEOUT="1") as alone:
        asked = pool.submit(driver.run, {"failing": new}, {"llama-gone": GOOD["llama"]})
        refused = [(alone.run({"silent": new})["silent"], "could not be reached", mute)]
        listening.close()
        refused.append((alone.run({"gone": new})["gone"], "could not be reached", mute))
        found = asked.result()
    hub.failing = None
    for (code, words, _), word, url in (*refused, (found["failing"], "503", hub.url)):
        assert code == 2, words[-3000:]
        assert word in words.splitlines()[0] and url in words.splitlines()[0]
    code, words, record = found["llama-gone"]
    assert code == 0, words[-3000:]
    assert record["loss"] == online["llama"][2]["loss"]
