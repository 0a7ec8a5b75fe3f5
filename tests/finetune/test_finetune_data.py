"""Rows to batches: files and folders as the hub lays them out, shapes of rows, masks, packing, order, bounds."""

import json
import shutil
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from rigs.command import interpreter, python
from rigs.hub import Hub, parquet
from rigs.tables import each_row, rows_of

from contracts.job_config import ConfigError, JobConfig
from finetune import rows as row_reader
from finetune.rows import IGNORED, Loader, Row, collate, encode, encode_row, load_tokenizer, pack, prepare

rows = rows_of(__file__)

pytestmark = pytest.mark.long
SUM = {"question": "What is 2 + 3?", "answer": "2 + 3 = 5"}
SHAPES = rows("shapes")()
TALK = SHAPES["messages"]["messages"]


@pytest.fixture(scope="module")
def tokenizer():
    """The built-in tokenizer: no download."""
    return load_tokenizer(JobConfig(tokenizer_name="builtin:bytes"))


def job(path=None, **settings):
    """Settings of a small job, on a file or folder where one is named."""
    named = {} if path is None else {"dataset_name": str(path)}
    return JobConfig(**{"max_length": 128, "tokenizer_name": "builtin:bytes", **named, **settings})


def load_rows(config, split):
    """The members of the rows."""
    return [row.members for row in row_reader.load_rows(config, split)]


def lists_of(example):
    """Arrays as lists, which compare as a whole."""
    return {field.name: getattr(example, field.name).tolist() for field in fields(example)}


@each_row("shape", SHAPES)
def test_each_row_shape_is_learnt_from(tokenizer, tmp_path, shape):
    """Labels are the next token, everywhere; from parquet the same as from the row, without its other columns.

    completion_only_loss masks the question, not the answer nor its end mark; of a prompt with a completion by itself.
    """
    row = SHAPES[shape]
    of_answers = lists_of(encode(row, tokenizer, job(completion_only_loss=True))) if shape != "text" else None
    assert (lists_of(encode(row, tokenizer, job())) == of_answers) == ("prompt" in row)
    example = encode(row, tokenizer, job(completion_only_loss=False))
    assert list(example.labels[:-1]) == list(example.tokens[1:])
    assert example.labels[-1] == IGNORED
    assert "Oui." in tokenizer.decode(example.tokens)
    told = {"completion_only_loss": False}
    config = job(parquet(tmp_path / f"{shape}.parquet", [{**row, "id": 7, "image": b"x" * 10}] * 3), **told)
    assert load_rows(config, "train") == [row] * 3
    examples, told = prepare(config, "train", tokenizer)
    assert list(map(lists_of, examples)) == [lists_of(example)] * 3
    assert (told["rows"], told["dropped_rows"]) == (3, 0)
    if shape != "text":
        example = encode(row, tokenizer, job(completion_only_loss=True))
        counted = tokenizer.decode([label for label in example.labels if label != IGNORED])
        assert counted == "Oui." + tokenizer.eos_token


@each_row(("row", "template", "text", "counted"), rows("spelled"))
def test_a_row_is_spelled_as_trl_spells_it(row, template, text, counted):
    """Tools and options reach the template, whose marks decide what counts; a text has one mark of its end."""
    config = job(chat_template=template, completion_only_loss=counted is not None)
    tokenizer = load_tokenizer(config)
    example = encode(row, tokenizer, config)
    assert tokenizer.decode(example.tokens).removeprefix(tokenizer.bos_token) == text
    counts = tokenizer.decode([label for label in example.labels if label != IGNORED])
    assert counts == (tokenizer.decode(example.tokens[1:]) if counted is None else counted)


def test_every_assistant_turn_counts(tokenizer):
    """Two answers of one talk."""
    talk = [("user", "a?"), ("assistant", "b."), ("user", "c?"), ("assistant", "d.")]
    row = {"messages": [{"role": r, "content": c} for r, c in talk]}
    example = encode(row, tokenizer, job(completion_only_loss=True))
    assert tokenizer.decode([x for x in example.labels if x != IGNORED]).replace(tokenizer.eos_token, "|") == "b.|d.|"


def test_an_answer_beyond_the_cut_leaves_nothing_to_learn(tokenizer):
    """Such a row is dropped and counted, not trained on."""
    row = {"question": "x" * 200, "answer": "y"}
    assert encode(row, tokenizer, job(completion_only_loss=True)) is None


@each_row(("row", "settings", "word"), rows("misfits"))
def test_a_row_that_does_not_fit_is_refused(row, settings, word):
    """Neither trained on as the text of a list, nor a stack trace; the message says what is needed."""
    with pytest.raises(ConfigError, match=rf"data\.jsonl: row 7: .*{word}"):
        encode_row(Row("data.jsonl", 7, row), load_tokenizer(job(**settings)), job(**settings))


def test_packing_keeps_every_token_and_every_boundary(tokenizer):
    """Packed rows hold the same tokens and labels; positions start again with each."""
    config = job(dataset_rows=50)
    rows, _ = prepare(config, "train", tokenizer)
    packed = pack(rows, 128)
    assert len(packed) < len(rows)
    assert all(len(e.tokens) <= 128 for e in packed)
    assert Counter(t for e in packed for t in e.tokens) == Counter(t for e in rows for t in e.tokens)
    assert sum(list(e.positions).count(0) for e in packed) == len(rows)
    for e in packed:
        for i, start in enumerate(e.positions[1:], 1):
            if start == 0:
                assert e.labels[i - 1] == IGNORED


def spelled(examples, count, length, pad):
    """A batch token by token: tokens, labels, positions, and whether a row has several documents."""
    rows, packed = [], False
    for number in range(count):
        e = examples[number] if number < len(examples) else None
        tokens, labels, positions = ([], [], []) if e is None else (list(e.tokens), list(e.labels), list(e.positions))
        packed |= 0 in positions[1:]
        while len(tokens) < length:
            tokens, labels = [*tokens, pad], [*labels, IGNORED]
            positions.append(positions[-1] + 1 if positions else 0)
        rows.append((tokens, labels, positions))
    return [*map(list, zip(*rows, strict=True)), packed]


@each_row("packing", [False, True])
@each_row("answers", [False, True])
def test_a_batch_is_the_one_that_is_spelled_token_by_token(tokenizer, packing, answers):
    """Full and short batches, padded and packed, with questions that count and that do not."""
    rows, _ = prepare(job(dataset_rows=30, packing=packing, completion_only_loss=answers), "train", tokenizer)
    for first, count in ((0, 4), (3, 1), (len(rows) - 2, 4), (len(rows), 2)):
        chosen = rows[first : first + count]
        made = collate(chosen, count, 128, 2)
        found = [*(t.tolist() for t in (made.tokens, made.labels, made.positions)), made.packed]
        assert found == spelled(chosen, count, 128, 2)
        assert sum(e.counted for e in chosen) == sum(label != IGNORED for row in found[1] for label in row)
    assert {str(t.dtype) for t in (made.tokens, made.labels, made.positions)} == {"torch.int64"}


@each_row(("micro", "count", "ranks"), [(2, 1, 4), (1, 8, 1), (4, 2, 1), (1, 2, 4)])
@each_row("by_length", [False, True])
def test_every_split_of_the_batch_sees_the_same_rows(tokenizer, micro, count, ranks, by_length):
    """Layouts of one global batch walk through the same rows in the same steps."""
    rows, _ = prepare(job(dataset_rows=40), "train", tokenizer)

    def steps(micro, count, ranks):
        shares = [
            list(Loader(examples=rows, pad=2, micro_batch=micro, micro_batches=count, rank=r, ranks=ranks, seed=5,
                        by_length=by_length).epoch(1))
            for r in range(ranks)
        ]  # fmt: skip
        return [
            sorted(bytes(t.tolist()).rstrip(b"\x02") if max(t) < 256 else tuple(x for x in t.tolist() if x != 2)
                   for s in at for b in s.batches for t in b.tokens)
            for at in zip(*shares, strict=True)
        ]  # fmt: skip

    assert steps(micro, count, ranks) == steps(8, 1, 1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_has_each_row_once(tokenizer, shuffle):
    """The last, short batch is filled with padding that does not count, in training and in evaluation."""
    rows, _ = prepare(job(dataset_rows=13), "test", tokenizer)
    common = {"examples": rows, "pad": 2, "micro_batch": 4, "micro_batches": 1, "ranks": 2, "shuffle": shuffle}
    shares = [share for rank in (0, 1) for share in Loader(rank=rank, **common).epoch(0)]
    counted = sum(int((batch.labels != IGNORED).sum()) for share in shares for batch in share.batches)
    assert counted == sum(label != IGNORED for e in rows for label in e.labels)
    whole = Loader(**{**common, "examples": rows * 20, "micro_batch": 32}, rank=0)  # 260 rows at 64
    assert whole.steps == len(list(whole.epoch(0))) == 5


def test_an_epoch_goes_on_where_it_was_left(tokenizer):
    """first_step skips exactly the steps before it."""
    rows, _ = prepare(job(dataset_rows=32), "train", tokenizer)
    loader = Loader(examples=rows, pad=2, micro_batch=4, micro_batches=1, rank=0, ranks=1, seed=1)
    whole, rest = list(loader.epoch(3)), list(loader.epoch(3, 5))
    assert [s.batches[0].tokens.tolist() for s in whole[5:]] == [s.batches[0].tokens.tolist() for s in rest]
    assert [s.batches[0].tokens.tolist() for s in loader.epoch(4)] != [s.batches[0].tokens.tolist() for s in whole]


def test_synthetic_sums_are_right_and_splits_differ():
    """The built-in set: correct, reproducible, no shared stream."""
    train, test = (load_rows(job(dataset_rows=64), split) for split in ("train", "test"))
    assert train == load_rows(job(dataset_rows=64), "train")
    assert train != test
    for row in train:
        left, right = row["answer"].split(" = ")
        a, b = left.split(" + ")
        assert int(a) + int(b) == int(right)


def test_plain_text_begins_as_its_tokenizer_begins_it():
    """A tokenizer that sets a mark of the beginning gets it in front of plain text, which no answer's span counts."""
    from tokenizers import processors

    tokenizer = load_tokenizer(JobConfig(tokenizer_name="builtin:bytes"))
    bare = encode(SHAPES["text"], tokenizer, job())
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, begin)]
    )
    assert list(encode(SHAPES["text"], tokenizer, job()).tokens) == [begin, *bare.tokens]
    example = encode(SHAPES["prompt"], tokenizer, job(completion_only_loss=True))
    assert example.tokens[0] == begin
    assert tokenizer.decode([x for x in example.labels if x != IGNORED]) == "Oui." + tokenizer.eos_token
    assert encode(SHAPES["messages"], tokenizer, job()).tokens.tolist().count(begin) == 0  # its template begins a talk


def test_files_of_a_hub_that_are_not_downloaded(tmp_path):
    """Names that lead out of the data set, a split above the limit, and the splits that the job does not read."""
    for name, texts in {"set": {"train": "a"}, "large": {"train": "ab", "test": 1}}.items():
        (tmp_path / name).mkdir()
        for split, text in texts.items():
            (tmp_path / name / f"{split}.jsonl").write_text(json.dumps({"text": text}))
    code = """
import sys; from contracts.job_config import ConfigError, JobConfig; from finetune import hub, rows; hub.MAX_BYTES = 13
for word in sys.argv[1:]:
    name, _, split = word.partition(":")
    try:
        print(*rows.find_files(JobConfig(dataset_name=name, dataset_revision="main"), split))
    except ConfigError as error:
        print("refused:", error)
"""
    hub = Hub()
    hub.add("datasets", "org/up", tmp_path / "set", listed=(f"../../../../../../../../{tmp_path}/up.jsonl",))
    hub.add("datasets", "org/root", tmp_path / "set", listed=(f"{tmp_path}/root.jsonl",))
    hub.add("datasets", "org/large", tmp_path / "large")
    asked = ("org/up:train", "org/root:train", "org/large:test", "org/large:train")
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}
    done = interpreter("-c", code, *asked, **environment)
    *found, refused = done.stdout.splitlines()
    names = [[Path(file).name for file in line.split()] for line in found]
    assert names == [["train.jsonl"], ["train.jsonl"], ["test.jsonl"]], done.stderr
    assert refused.startswith("refused: dataset_name='org/large'") and "hf download --include" in refused
    assert not any("/org/large/" in one and "train.jsonl" in one for one in hub.asked)
    hub.close()
    assert not list(tmp_path.glob("*.jsonl"))


def test_nulls_of_a_table_are_absent_members(tmp_path):
    """Rows of two shapes in one table, and messages with members that only some have."""
    tool = {"messages": [{"role": "user", "content": "a?", "name": "Ann"}, TALK[1]]}
    config = job(parquet(tmp_path / "train.parquet", [{**tool, **dict.fromkeys(SUM)}, {**SUM, "messages": None}]))
    assert load_rows(config, "train") == [tool, SUM]
    assert len(prepare(config, "train", load_tokenizer(config))[0]) == 2


def test_files_of_a_split_in_the_order_of_their_names(tmp_path):
    """Shards, a folder per part, and which part."""
    for part in ("main", "socratic"):
        for shard in (1, 0):
            rows = [{**SUM, "answer": f"{part} {shard} {n}"} for n in range(2)]
            parquet(tmp_path / part / f"train-0000{shard}-of-00002.parquet", rows)
    rows = load_rows(job(tmp_path, dataset_config="main"), "train")
    assert [row["answer"] for row in rows] == ["main 0 0", "main 0 1", "main 1 0", "main 1 1"]
    assert len(load_rows(job(tmp_path, dataset_config="main", dataset_rows=3), "train")) == 3
    with pytest.raises(ConfigError, match="dataset_config must be one of main, socratic"):
        load_rows(job(tmp_path), "train")
    with pytest.raises(ConfigError, match="'validation'"):
        load_rows(job(tmp_path, dataset_config="main"), "validation")
    (tmp_path / "test.json").write_text(json.dumps([SUM, SHAPES["prompt"]]))
    assert len(load_rows(job(tmp_path / "test.json"), "train")) == 2
    with pytest.raises(ConfigError, match="one file has no split 'test'"):
        load_rows(job(tmp_path / "test.json"), "test")
    with pytest.raises(ConfigError, match="no such file"):
        load_rows(job(tmp_path / "absent.jsonl"), "train")


def test_the_card_says_which_files_a_split_has(tmp_path):
    """Patterns, lists, a split that is not named; unknown names list what there is."""
    shutil.copy(Path(__file__).with_name("jobs") / "card.md", tmp_path / "README.md")
    for name in ("main/tr-0.parquet", "main/a.parquet", "socratic/one.parquet"):
        parquet(tmp_path / name, [{"text": name}])
    (tmp_path / "main/b.jsonl").write_text('{"text": "main/b.jsonl"}\n')
    found = {
        (part, split): [row["text"] for row in load_rows(job(tmp_path, dataset_config=part), split)]
        for part, split in (("main", "train"), ("main", "test"), ("socratic", "train"))
    }
    assert found == {
        ("main", "train"): ["main/tr-0.parquet"],
        ("main", "test"): ["main/a.parquet", "main/b.jsonl"],
        ("socratic", "train"): ["socratic/one.parquet"],
    }
    for settings, split, word in rows("card")():
        with pytest.raises(ConfigError, match=word):
            load_rows(job(tmp_path, **settings), split)
    split = "configs: [{config_name: a, data_files: [{split: x}]}]"  # without its path
    number = "configs: [{config_name: a, data_files: [{split: train, path: [1]}]}]"
    for broken in ("configs: [1]", number, "configs: 5", split, "a: [", "- 1"):
        (tmp_path / "README.md").write_text(f"---\n{broken}\n---\n")
        with pytest.raises(ConfigError, match=r"README\.md"):
            load_rows(job(tmp_path), "train")


def test_what_is_not_parquet_is_said_in_one_line(tmp_path):
    """Truncated, another format, an empty file."""
    whole = parquet(tmp_path / "whole.parquet", [SUM] * 50).read_bytes()
    for number, content in enumerate((b"", b"PAR1", whole[:-20], whole[:40] + b"\0" * 60 + whole[100:], b"{}" * 40)):
        path = tmp_path / f"broken{number}.parquet"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not parquet") as caught:
            load_rows(job(path), "train")
        assert "\n" not in str(caught.value)


def test_rows_are_bounded_as_they_unpack(tmp_path, monkeypatch):
    """A small file of a long text, a million times: counted unpacked, and only as far as rows are asked for."""
    monkeypatch.setattr(row_reader, "MAX_BYTES", 1 << 20)  # a limit of gigabytes, at a size that a test can unpack
    path = parquet(tmp_path / "train.parquet", [{"text": "x" * 100_000}] * 4000)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ConfigError, match="dataset_rows"):
        load_rows(job(path), "train")
    lines = tmp_path / "long.jsonl"
    lines.write_text('{"text": "' + "x" * 100_000 + '"}\n' + ('{"text": "y"}\n' * 100_000))
    with pytest.raises(ConfigError, match="dataset_rows"):
        load_rows(job(lines), "train")
    assert len(load_rows(job(lines, dataset_rows=5), "train")) == 5
    whole = tmp_path / "list.json"  # a list is in memory as a whole before its first row
    whole.write_text(json.dumps([{"text": "y"}] * 100_000))
    with pytest.raises(ConfigError, match=r"list\.json: a JSON list of more than .* JSON lines"):
        load_rows(job(whole, dataset_rows=5), "train")


def test_json_lines_end_at_line_feeds_only(tmp_path):
    """Other marks of Unicode that look like the end of a line are inside texts."""
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "a\u2028b\x85c"}\n\n{"text": "d"}\n', encoding="utf-8")
    assert load_rows(job(path), "train") == [{"text": "a\u2028b\x85c"}, {"text": "d"}]
    path.write_text('{"text": 1}\n' + "[" * 100_000, encoding="utf-8")
    with pytest.raises(ConfigError, match="row 1"):
        load_rows(job(path), "train")


def test_csv_cells_are_text(tmp_path):
    """Also those that look like numbers or like nothing."""
    (tmp_path / "train.csv").write_text("question,answer\n1 + 1?,2\nNone?,NA\n")
    config = job(tmp_path)
    assert load_rows(config, "train") == [{"question": "1 + 1?", "answer": "2"}, {"question": "None?", "answer": "NA"}]


def test_nothing_of_datasets_is_written_or_asked(tmp_path):
    """A folder is read without a cache, a home or a network."""
    parquet(tmp_path / "train.parquet", [SUM])
    code = (
        "import socket, sys; socket.socket.connect = None\n"
        "from contracts.job_config import JobConfig; from finetune.rows import load_rows\n"
        f"assert len(load_rows(JobConfig(dataset_name={str(tmp_path)!r}), 'train')) == 1\n"
    )
    python(code, HF_HOME="/proc/none", HOME="/proc/none", XDG_CACHE_HOME="/proc/none")


def test_what_cannot_be_read_is_named_with_file_and_row(tmp_path):
    """A broken line, a row that is no mapping, a null cell, a number instead of a text; each in one line."""
    parquet(tmp_path / "null.parquet", [{"text": "a"}, {"text": None}])
    wrong = []
    for name, (content, words) in rows("unread")().items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content.encode("latin-1"))
        config = job(path)
        try:
            prepare(config, "train", load_tokenizer(config))
            wrong.append(f"{name}: was read")
        except ConfigError as error:
            wrong += [f"{name}: {word!r} is not in {error}" for word in words if word not in str(error)]
            wrong += [f"{name}: {len(str(error).splitlines())} lines"] if "\n" in str(error) else []
    assert wrong == []
