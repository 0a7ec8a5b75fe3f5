"""The user's own manifests, wrapped: what is added is on separate lines, and all else stays where it was."""

import os
from dataclasses import replace
from difflib import unified_diff

import pytest
import yaml
from rigs.pods import templates
from rigs.tables import ROOT, each_row, rows_of

from contracts.job_config import parse_config
from planner.kubernetes.wrap import Additions, WrapError, find_jobs, note_others, wrap
from planner.kubernetes.yaml_edit import EditError, documents, extend
from planner.nccl_env.situation import Reason, Setting
from planner.stacks.arguments import add_defaults, read_command

rows = rows_of(__file__)

WHY = Reason(rule="rails", evidence="two NICs", source="a test")
ADDED = Additions(
    settings=(Setting(name="NCCL_IB_HCA", value="=mlx5_0,mlx5_1", reason=WHY),
              Setting(name="NCCL_CROSS_NIC", value="0", reason=WHY)),
    needs=(Setting(name="shm_bytes", value=str(8 << 30), reason=WHY),
           Setting(name="capability", value="IPC_LOCK", reason=WHY),
           Setting(name="network", value="rdmashared-net", reason=WHY),
           Setting(name="resource", value="rdma/*: 1", reason=WHY)),
    resources={"rdma/rdma_shared_device_eth": "1"}, gate_image="registry.example/topoflight:1", log=True,
    annotations={"forecast-step": "step 1 s"},
)  # fmt: skip
FILE = ROOT / "tests/golden/wrap.yaml"


class Dumper(yaml.SafeDumper):
    """Write texts of several lines as blocks."""


Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(
    "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None))  # fmt: skip


def additions(row: dict) -> Additions:
    """The additions of a row: all of ADDED, ADDED with changes, or only what the row names."""
    added = row["added"]
    if added == "all":
        return ADDED
    words = {name: value for name, value in added.items() if name not in ("all", "needs")}
    needs = tuple(Setting(name=name, value=value, reason=WHY) for name, value in added.get("needs", ()))
    return replace(ADDED if added.get("all") else Additions(), needs=needs, **words)


def wrapped(text: str, added: Additions) -> tuple[str, list[str]]:
    """The text with the same additions for each of its jobs, and the notes."""
    return wrap(text, [added for _ in find_jobs(documents(text))])


def changes(text: str, made: str) -> list[str]:
    """The lines that wrapping has added to the text and removed from it, with their places."""
    return [*unified_diff(text.splitlines(), made.splitlines(), n=0, lineterm="")][2:]


def described(row: dict, made: str, notes: list[str], usual: set[str]) -> dict:
    """The row with its jobs (pods, nodes and ranks), other objects, changes and notes.

    A row that is not `whole` has only the changed lines that are in no whole row.
    """
    found, lines = documents(row["text"]), changes(row["text"], made)
    jobs = [[job.kind, *(part.where for part in job.parts), job.nodes, job.ranks_per_node] for job in find_jobs(found)]
    if not row.get("whole"):
        lines = [line for line in lines if not line.startswith("@@") and line.strip("+ ") not in usual]
    return row | {"jobs": jobs, "others": note_others(found), "changes": "\n".join(lines), "notes": notes}


def test_golden_wraps(golden):
    """The lines of the user stay, but for additions in brackets; wrapping again changes nothing; names are unique."""
    head, rows = FILE.read_text(encoding="utf-8").partition("- what")[0], yaml.safe_load(FILE.read_text("utf-8"))
    results = [wrapped(row["text"], additions(row)) for row in rows]
    golden("wrapped.yaml", "\n---\n".join(made for made, _ in results), digest=True)
    usual = {line.strip("+ ") for row, (made, _) in zip(rows, results, strict=True) if row.get("whole")
             for line in changes(row["text"], made)}  # fmt: skip
    now = [described(row, made, notes, usual) for row, (made, notes) in zip(rows, results, strict=True)]
    if os.environ.get("TOPOFLIGHT_UPDATE_GOLDEN") == "1":
        text = yaml.dump(now, Dumper=Dumper, sort_keys=False, width=4000, allow_unicode=True, default_flow_style=None)
        FILE.write_text(head + text, encoding="utf-8")
        return
    assert [(old["what"], new["changes"]) for old, new in zip(rows, now, strict=True) if old != new] == []
    for row, (made, notes) in zip(rows, results, strict=True):
        again, said = wrapped(made, additions(row))
        assert again == made, row["what"]
        if row["what"].startswith("the published job"):
            assert said == [note for note in notes if "failed gate" not in note]
        removed = [line for line in changes(row["text"], made) if line.startswith("-")]
        assert not [line for line in removed if "{" not in line], row["what"]
        for pod in templates(documents(made)):
            names = [each["name"] for key in ("containers", "initContainers") for each in pod["spec"].get(key, ())]
            assert len(set(names)) == len(names), row["what"]


@each_row(("text", "says"), rows("refused"))
def test_what_cannot_be_wrapped_is_refused_with_its_reason(text: str, says: str) -> None:
    with pytest.raises(WrapError, match=says):
        find_jobs(documents(text))


def test_the_gate_has_the_jobs_config_maps_and_shared_memory_beyond_the_limit_is_named() -> None:
    """Secrets are no part of the gate; a volume that fits into the memory limit is not named."""
    for size, is_named in (("64Gi", True), ("16Gi", False)):
        made, notes = wrapped(rows("shared_memory")().replace("SIZE", size), ADDED)
        (gate,) = documents(made)[0]["spec"]["template"]["spec"]["initContainers"]
        assert gate["envFrom"] == [{"configMapRef": {"name": "nccl"}}], size
        assert any("counts towards the memory limit of 32768 MiB" in note for note in notes) is is_named, (size, notes)


def test_an_edit_adds_and_never_changes() -> None:
    text = "a: 1   # one\nb:\n- x\nc: |\n  text\n\nd: &d {e: [1]}\nf: *d\ng:\n"
    found = documents(text)
    found[0]["b"].append({"y": [2]})
    found[0]["d"]["e"].append("it's")
    found[0]["g"] = {"h": None}
    found[0]["i"] = "new"
    made = extend(text, found)
    assert documents(made) == found and made.startswith("a: 1   # one\nb:\n- x\n- y:\n")
    assert "d: &d {e: [1, it's]}\nf: *d\ng:\n  h: null\ni: new\n" in made
    of_windows = extend(text.replace("\n", "\r\n"), found)
    assert of_windows.count("\n") == of_windows.count("\r\n")
    with pytest.raises(EditError):
        extend(text, [{**found[0], "a": 2}])


@each_row(("text", "made"), rows("brackets"))
def test_a_collection_in_brackets_keeps_its_form(text: str, made: str) -> None:
    """Characters are only added: in lines where the members are in lines, with quotes where they have them."""
    wanted = [{"a": [{"k": "v", "n": "2"}, {"m": "x y"}]}]
    assert extend(text, wanted) == made
    assert extend(text.replace("\n", "\r\n"), wanted) == made.replace("\n", "\r\n")
    with pytest.raises(EditError, match="a comment is at its end"):
        extend("a: [\n  {k: v},  # one\n]\n", wanted)
    assert extend('{"b": "x # y", "a": []}\n', [{"b": "x # y", "a": [1]}]) == '{"b": "x # y", "a": [1]}\n'
    assert extend("{a:, b: ~}\n", [{"a": [1], "b": {"c": "d"}}]) == "{a: [1], b: {c: d}}\n"
    assert extend('{"a": null}\n', [{"a": [{"b": "c"}]}]) == '{"a": [{"b": "c"}]}\n'
    assert extend("a: null  # none\n", [{"a": ["b"]}]) == "a: [b]  # none\n"
    assert extend("a: [&b {k: v}, *b]\n", [{"a": [{"k": "v"}, {"k": "v"}, 1]}]) == "a: [&b {k: v}, *b, 1]\n"


def test_an_alias_and_kept_newlines_at_the_end_take_an_addition() -> None:
    text = "a: &a {k: v}\nb:\n- *a\nc:\n- &d\n  k: w\n- *d\n# next\ne:\n  f: |+\n    text\n\n\ng: 1\n"
    wanted = documents(text)
    wanted[0]["b"].append("x")
    wanted[0]["c"].append("y")
    wanted[0]["e"]["h"] = "z"
    made = "a: &a {k: v}\nb:\n- *a\n- x\nc:\n- &d\n  k: w\n- *d\n- y\n# next\ne:\n  f: |+\n    text\n\n\n  h: z\ng: 1\n"
    assert extend(text, wanted) == made


FILES: dict[str, str] = rows("files")()


def test_a_text_without_a_last_newline_gets_none() -> None:
    for text in ("kind: Job\nmetadata:\n  name: a\nspec:\n  template:\n    spec:\n      containers:\n      - name: t",
                 gpu_job() + "# end\n    ", gpu_job().rstrip()):  # fmt: skip
        assert wrap(text, [None]) == (text, [])
        made = wrapped(text, ADDED)[0]
        removed = [line for line in changes(text, made) if line.startswith("-") and "{" not in line]
        assert not removed and not made.endswith("\n"), text


@each_row(("text", "says"), rows("ranks"))
def test_ranks_that_get_no_variable_are_named(text: str, says: list[str]) -> None:
    """A runtime in the same file as its TrainJob has the TrainJob's number of nodes."""
    notes = wrapped(text, replace(ADDED, gate_image=None))[1]
    assert [note.partition(":")[0] for note in notes if "mpirun" in note] == says
    assert {job.nodes for job in find_jobs(documents(text))} <= {2}


@each_row(("words", "nodes", "ranks", "settings"), rows("trains"))
def test_a_command_says_what_it_trains(words, nodes, ranks, settings):
    said = read_command(words, FILES.get)
    assert (said.nodes, said.ranks_per_node, said.unknown) == (nodes, ranks, [])
    assert settings.items() <= said.settings.items()


def test_accelerates_files_say_layouts_and_its_command_line_goes_over_them() -> None:
    """FSDP alone leaves all ranks to data parallelism, next to degrees that the file names."""
    config = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n" \
             "parallelism_config: {parallelism_config_cp_size: 2, parallelism_config_dp_shard_size: 1}\n"  # fmt: skip
    said = read_command(["accelerate", "launch", "--config_file", "cp.yaml", "train.py"], {"cp.yaml": config}.get)
    _, settings, *_ = parse_config(add_defaults(said))
    assert {"cp": 2, "tp": 1, "dp_shard": 1, "sharding": "zero3"}.items() <= settings["layout"].items()
    file = {"a.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n"}.get
    said = read_command(["accelerate", "launch", "--config_file", "a.yaml", "--zero_stage", "3", "sft.py"], file)
    assert said.settings["deepspeed"] == {"zero_optimization": {"stage": 3}}


def test_what_a_command_does_not_say_is_unknown_or_the_trainers_default_by_name() -> None:
    said = read_command(["torchrun", "sft.py", "--config", "gone.yaml", "--my_own", "3"], FILES.get)
    assert said.unknown == ["gone.yaml: what the file says, which is not here"]
    assert "my_own" in said.notes[0] and "my_own" not in said.settings
    other = read_command(["torchrun", "sft.py", "--my_own", "3", "--", "data"], FILES.get)
    assert "ignores: my_own" in other.notes[0], "a bare -- is no setting"
    assert read_command(["bash", "-c", "./start.sh"], FILES.get).unknown
    trl = ["trl", "sft", "--model_name_or_path", "m"]
    assert add_defaults(read_command(trl, FILES.get))["dtype"] == "float32"
    assert add_defaults(read_command([*trl, "--dtype", "bfloat16"], FILES.get))["dtype"] == "bfloat16"
    assert add_defaults(read_command([*trl, "--use_peft"], FILES.get))["dtype"] == "float32"
    assert "dtype" not in add_defaults(read_command([*trl, "--use_peft", "--load_in_4bit"], FILES.get))
    made = add_defaults(said)
    assert "dtype" not in made
    assert made["fsdp"] is False and "per_device_train_batch_size=8" in said.notes[-1]


@each_row(("line", "says"), rows("unforecast"))
def test_what_no_forecast_reads_and_memory_hangs_on_leaves_it_unknown(line: str, says: str) -> None:
    said = read_command(["sh", "-c", line], FILES.get)
    assert len(said.unknown) == 1 and says in said.unknown[0]


@each_row("line", rows("shells"))
def test_a_shells_words_and_a_file_by_its_place_are_read(line: str) -> None:
    said = read_command(["sh", "-c", line], {"rows.yaml": "max_length: 2048\n"}.get)
    assert said.unknown == [] and said.settings["max_length"] == 2048


def gpu_job(body: dict | None = None, **resources) -> str:
    """A job of one container; `body` are further words of its pod."""
    container = {"name": "main", "command": ["torchrun", "t.py"], "resources": resources}
    pod = {"metadata": {}, "spec": {"containers": [container], **(body or {})}}
    return yaml.safe_dump({"kind": "Job", "metadata": {"name": "j"}, "spec": {"parallelism": 2, "template": pod}})


@each_row(("resources", "alone"), rows("without_gpu"))
def test_which_jobs_have_no_gpu(resources: dict, alone: bool) -> None:
    (job,) = find_jobs(documents(gpu_job(**resources)))
    assert job.without_gpus is alone
    (job,) = find_jobs(documents(gpu_job({"runtimeClassName": "nvidia"}, **resources)))
    assert not job.without_gpus, "a runtime class may give GPUs"
