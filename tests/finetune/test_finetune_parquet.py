"""Data files: every shape of row, folders and cards as the hub lays them out, bounds, and what names a bad row."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contracts.job_config import ConfigError, JobConfig
from finetune import rows as sources
from finetune.data import prepare
from finetune.rows import encode, load_tokenizer


def load_rows(config, split):
    """The members of the rows."""
    return [row.members for row in sources.load_rows(config, split)]


ROOT = Path(__file__).parents[2]
SUM = {"question": "What is 2 + 3?", "answer": "2 + 3 = 5"}
TALK = [{"role": "user", "content": "Née?"}, {"role": "assistant", "content": "Oui."}]
SHAPES = {
    "messages": {"messages": TALK},
    "prompt": {"prompt": "Née?", "completion": "Oui."},
    "conversation": {"prompt": TALK[:1], "completion": TALK[1:]},
    "question": {"question": "Née?", "answer": "Oui."},
    "text": {"text": "Née? Oui."},
}


def job(path, **settings):
    """Settings of a small job on a file or folder."""
    return JobConfig(dataset_name=str(path), max_length=64, tokenizer_name="builtin:bytes", **settings)


def write(path, rows, **options):
    """A parquet file of these rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def distinct_names(example):
    """Arrays as lists, which compare as a whole."""
    return {field.name: getattr(example, field.name).tolist() for field in fields(example)}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_row_shape_reads_as_from_json(tmp_path, shape):
    """The same tokens and labels as the row itself; other columns are not read."""
    row = SHAPES[shape]
    config = job(write(tmp_path / "train.parquet", [{**row, "id": 7, "image": b"x" * 10}] * 3))
    tokenizer = load_tokenizer(config)
    assert load_rows(config, "train") == [row] * 3
    examples, told = prepare(config, "train", tokenizer)
    assert list(map(distinct_names, examples)) == [distinct_names(encode(row, tokenizer, config))] * 3
    assert (told["rows"], told["dropped_rows"]) == (3, 0)


def test_nulls_of_a_table_are_absent_members(tmp_path):
    """Rows of two shapes in one table, and messages with members that only some have."""
    tool = {"messages": [{"role": "user", "content": "a?", "name": "Ann"}, TALK[1]]}
    config = job(write(tmp_path / "train.parquet", [{**tool, **dict.fromkeys(SUM)}, {**SUM, "messages": None}]))
    assert load_rows(config, "train") == [tool, SUM]
    assert len(prepare(config, "train", load_tokenizer(config))[0]) == 2


def test_files_of_a_split_in_the_order_of_their_names(tmp_path):
    """Shards, a folder per part, and which part."""
    for part in ("main", "socratic"):
        for shard in (1, 0):
            rows = [{**SUM, "answer": f"{part} {shard} {n}"} for n in range(2)]
            write(tmp_path / part / f"train-0000{shard}-of-00002.parquet", rows)
    rows = load_rows(job(tmp_path, dataset_config="main"), "train")
    assert [row["answer"] for row in rows] == ["main 0 0", "main 0 1", "main 1 0", "main 1 1"]
    assert len(load_rows(job(tmp_path, dataset_config="main", dataset_rows=3), "train")) == 3
    with pytest.raises(ConfigError, match="dataset_config must be one of main, socratic"):
        load_rows(job(tmp_path), "train")
    with pytest.raises(ConfigError, match="'validation'"):
        load_rows(job(tmp_path, dataset_config="main"), "validation")


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/tr*
  - split: test
    path: [main/a.parquet, main/b.jsonl]
- config_name: socratic
  data_files: socratic/*
---
# Sums
"""


def test_the_card_says_which_files_a_split_has(tmp_path):
    """Patterns, lists, a split that is not named; unknown names list what there is."""
    (tmp_path / "README.md").write_text(CARD)
    for name in ("main/tr-0.parquet", "main/a.parquet", "socratic/one.parquet"):
        write(tmp_path / name, [{"text": name}])
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
    for settings, split, word in (
        ({}, "train", "must be one of main, socratic"),
        ({"dataset_config": "mian"}, "train", "'mian': must be one of main, socratic"),
        ({"dataset_config": "socratic"}, "test", "socratic has train"),
    ):
        with pytest.raises(ConfigError, match=word):
            load_rows(job(tmp_path, **settings), split)
    split = "configs: [{config_name: a, data_files: [{split: x}]}]"  # without its path
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\n" + "".join(f"c{n}: [*b, *b]\n" for n in range(20))
    number = "configs: [{config_name: a, data_files: [{split: train, path: [1]}]}]"
    for broken in ("configs: [1]", number, "configs: 5", split, "a: [", "- 1", bomb):
        (tmp_path / "README.md").write_text(f"---\n{broken}\n---\n")
        with pytest.raises(ConfigError, match=r"README\.md"):
            load_rows(job(tmp_path), "train")


def test_what_is_not_parquet_is_said_in_one_line(tmp_path):
    """Truncated, another format, an empty file."""
    whole = write(tmp_path / "whole.parquet", [SUM] * 50).read_bytes()
    for number, content in enumerate((b"", b"PAR1", whole[:-20], whole[:40] + b"\0" * 60 + whole[100:], b"{}" * 40)):
        path = tmp_path / f"broken{number}.parquet"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not parquet") as caught:
            load_rows(job(path), "train")
        assert "\n" not in str(caught.value)


def test_rows_are_bounded_as_they_unpack(tmp_path, monkeypatch):
    """A small file of a long text, a million times: counted unpacked, and only as far as rows are asked for."""
    monkeypatch.setattr(sources, "MAX_BYTES", 1 << 20)  # a limit of gigabytes, at a size that a test can unpack
    path = write(tmp_path / "train.parquet", [{"text": "x" * 100_000}] * 4000)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ConfigError, match="dataset_rows"):
        load_rows(job(path), "train")
    lines = tmp_path / "long.jsonl"
    lines.write_text('{"text": "' + "x" * 100_000 + '"}\n' + ('{"text": "y"}\n' * 100_000))
    with pytest.raises(ConfigError, match="dataset_rows"):
        load_rows(job(lines), "train")
    assert len(load_rows(job(lines, dataset_rows=5), "train")) == 5


def test_json_lines_end_at_line_feeds_only(tmp_path):
    """Other marks of Unicode that look like the end of a line stand inside texts."""
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "a\u2028b\x85c"}\n\n{"text": "d"}\n', encoding="utf-8")
    assert load_rows(job(path), "train") == [{"text": "a\u2028b\x85c"}, {"text": "d"}]
    path.write_text('{"text": 1}\n' + "[" * 100_000, encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        load_rows(job(path), "train")


BAD_ROWS = {  # file -> content, words of the message
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', ["broken.jsonl", "line 2"]),
    "list.jsonl": (b'{"text": "a"}\n\n[1]\n', ["list.jsonl", "line 3", "must be a mapping, this is list"]),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}\n', ["latin.jsonl", "utf-8"]),
    "null.jsonl": (b'{"text": "a"}\n{"text": null}\n', ["null.jsonl: row 2", "dataset_text_field"]),
    "number.jsonl": (b'{"text": "a"}\n{"text": "b"}\n{"text": 7}\n', ["number.jsonl: row 3", "dataset_text_field"]),
    "half.jsonl": (b'{"question": "a?", "answer": "b"}\n{"question": "a?"}\n', ["half.jsonl: row 2", "question"]),
    "deep.jsonl": (b'{"text": "a"}\n{"text": ' + b'{"a":' * 12 + b"1" + b"}" * 12 + b"}\n", ["deep.jsonl: row 2"]),
    "list.json": (b'[{"text": "a"}, {"text": "b"}, {"text": null}]', ["list.json: row 3"]),
    "cut.json": (b'[{"text": "a"}, {"text": ', ["cut.json"]),
    "empty.jsonl": (b"", ["empty.jsonl", "no rows"]),
    "rows.csv": (b'question,answer\n"a', ["rows.csv"]),
    "rows.txt": (b"a", ["rows.txt", ".jsonl"]),
}  # fmt: skip


def test_what_cannot_be_read_is_named_with_file_and_row(tmp_path):
    """A broken line, a row that is no mapping, a null cell, a number in place of a text; each in one line."""
    write(tmp_path / "null.parquet", [{"text": "a"}, {"text": None}])
    rows = {**BAD_ROWS, "null.parquet": (None, ["null.parquet: row 2", "dataset_text_field"])}
    wrong = []
    for name, (content, words) in rows.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        config = job(path)
        try:
            prepare(config, "train", load_tokenizer(config))
            wrong.append(f"{name}: was read")
        except ConfigError as error:
            wrong += [f"{name}: {word!r} is not in {error}" for word in words if word not in str(error)]
            wrong += [f"{name}: {len(str(error).splitlines())} lines"] if "\n" in str(error) else []
    assert wrong == []


def test_csv_cells_are_text(tmp_path):
    """Also those that look like numbers or like nothing."""
    (tmp_path / "train.csv").write_text("question,answer\n1 + 1?,2\nNone?,NA\n")
    config = job(tmp_path)
    assert load_rows(config, "train") == [{"question": "1 + 1?", "answer": "2"}, {"question": "None?", "answer": "NA"}]


def test_nothing_of_datasets_is_written_or_asked(tmp_path):
    """A folder is read without a cache, a home or a network; the agent's verbs load none of its libraries."""
    write(tmp_path / "train.parquet", [SUM])
    code = (
        "import socket, sys; socket.socket.connect = None\n"
        "from contracts.job_config import JobConfig; from finetune.rows import load_rows\n"
        f"assert len(load_rows(JobConfig(dataset_name={str(tmp_path)!r}), 'train')) == 1\n"
    )
    home = {"HF_HOME": "/proc/none", "HOME": "/proc/none", "XDG_CACHE_HOME": "/proc/none"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=280, env={**os.environ, **home}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for verb in ("--help", "recommend --help"):
        heavy = "{'datasets', 'pandas', 'pyarrow', 'torch', 'transformers'}"
        code = (
            "import sys\nfrom agent.cli.__main__ import main\n"
            f"sys.argv[1:] = {verb.split()!r}\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
            f"sys.exit(' '.join({heavy} & set(sys.modules)) or 0)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=280)
        assert (done.returncode, done.stderr) == (0, ""), verb
