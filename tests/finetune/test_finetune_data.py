"""Rows to batches: shapes of rows, masks, packing, order."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from rigs.hub import Hub
from rigs.tables import each_row

from contracts.job_config import ConfigError, JobConfig
from finetune.data import Loader, collate, pack, prepare
from finetune.rows import IGNORED, encode, load_rows, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    """The built-in tokenizer: no download."""
    return load_tokenizer(JobConfig(tokenizer_name="builtin:bytes"))


def job(**settings):
    """Settings of a small job."""
    return JobConfig(**{"max_length": 128, **settings})


ROWS = [
    {"messages": [{"role": "user", "content": "Née?"}, {"role": "assistant", "content": "Oui."}]},
    {"prompt": "Née?", "completion": "Oui."},
    {"prompt": [{"role": "user", "content": "Née?"}], "completion": [{"role": "assistant", "content": "Oui."}]},
    {"question": "Née?", "answer": "Oui."},
    {"text": "Née? Oui."},
]


@each_row("row", ROWS, ids=["messages", "prompt", "conversation", "question", "text"])
def test_each_row_shape_is_learnt_from(tokenizer, row):
    """Labels are the next token, everywhere."""
    example = encode(row, tokenizer, job())
    assert example is not None
    assert list(example.labels[:-1]) == list(example.tokens[1:])
    assert example.labels[-1] == IGNORED
    assert "Oui." in tokenizer.decode(example.tokens)


@each_row("row", ROWS[:4], ids=["messages", "prompt", "conversation", "question"])
def test_only_answers_count_when_asked(tokenizer, row):
    """completion_only_loss masks the question, not the answer nor its end mark."""
    example = encode(row, tokenizer, job(completion_only_loss=True))
    counted = tokenizer.decode([label for label in example.labels if label != IGNORED])
    assert counted == "Oui." + tokenizer.eos_token


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


@each_row(
    ("row", "settings", "word"),
    [({"q": 1}, {}, "question"), ({"text": "a"}, {"completion_only_loss": True}, "answer")],
)
def test_a_row_that_does_not_fit_is_refused(tokenizer, row, settings, word):
    """The message says what is needed."""
    with pytest.raises(ConfigError, match=word):
        encode(row, tokenizer, job(**settings))


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
    """A batch token by token: tokens, labels, positions, and where a row's documents end."""
    rows = []
    for number in range(count):
        e = examples[number] if number < len(examples) else None
        tokens, labels, positions = ([], [], []) if e is None else (list(e.tokens), list(e.labels), list(e.positions))
        ends = [at for at in range(1, len(positions)) if positions[at] == 0]
        while len(tokens) < length:
            tokens, labels = [*tokens, pad], [*labels, IGNORED]
            positions.append(positions[-1] + 1 if positions else 0)
        rows.append((tokens, labels, positions, ends))
    most = 1 + max(len(ends) for *_, ends in rows)
    tokens, labels, positions, ends = zip(*rows, strict=True)
    return [
        *map(list, (tokens, labels, positions)),
        [e + [length] * (most - len(e)) for e in ends] if most > 1 else None,
    ]


@each_row("packing", [False, True])
@each_row("answers", [False, True])
def test_a_batch_is_the_one_that_is_spelled_token_by_token(tokenizer, packing, answers):
    """Full and short batches, padded and packed, with questions that count and that do not."""
    rows, _ = prepare(job(dataset_rows=30, packing=packing, completion_only_loss=answers), "train", tokenizer)
    for first, count in ((0, 4), (3, 1), (len(rows) - 2, 4), (len(rows), 2)):
        chosen = rows[first : first + count]
        made = collate(chosen, count, 128, 2)
        found = [None if t is None else t.tolist() for t in (made.tokens, made.labels, made.positions, made.ends)]
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


def test_evaluation_sees_each_row_once(tokenizer):
    """The last, short batch is filled with padding that does not count."""
    rows, _ = prepare(job(dataset_rows=13), "test", tokenizer)
    loader = Loader(examples=rows, pad=2, micro_batch=4, micro_batches=1, rank=1, ranks=2, shuffle=False)
    other = Loader(examples=rows, pad=2, micro_batch=4, micro_batches=1, rank=0, ranks=2, shuffle=False)
    counted = sum(int((b.labels != IGNORED).sum()) for one in (loader, other) for s in one.epoch(0) for b in s.batches)
    assert counted == sum(label != IGNORED for e in rows for label in e.labels)


def test_an_epoch_goes_on_where_it_was_left(tokenizer):
    """first_step skips exactly the steps before it."""
    rows, _ = prepare(job(dataset_rows=32), "train", tokenizer)
    loader = Loader(examples=rows, pad=2, micro_batch=4, micro_batches=1, rank=0, ranks=1, seed=1)
    whole, rest = list(loader.epoch(3)), list(loader.epoch(3, 5))
    assert [s.batches[0].tokens.tolist() for s in whole[5:]] == [s.batches[0].tokens.tolist() for s in rest]
    assert [s.batches[0].tokens.tolist() for s in loader.epoch(4)] != [s.batches[0].tokens.tolist() for s in whole]


def test_local_files_and_folders(tmp_path):
    """JSON lines, a JSON list, a folder with one file per split."""
    lines = tmp_path / "train.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    (tmp_path / "test.json").write_text(json.dumps(ROWS[:2]))
    assert len(load_rows(job(dataset_name=str(lines)), "train")) == 3
    assert len(load_rows(job(dataset_name=str(tmp_path)), "train")) == 3
    assert len(load_rows(job(dataset_name=str(tmp_path)), "test")) == 2
    assert len(load_rows(job(dataset_name=str(tmp_path), dataset_rows=1), "test")) == 1
    with pytest.raises(ConfigError, match="validation"):
        load_rows(job(dataset_name=str(tmp_path)), "validation")
    lines.write_text("{]")
    with pytest.raises(ConfigError, match="JSON"):
        load_rows(job(dataset_name=str(lines)), "train")
    with pytest.raises(ConfigError, match="no such file"):
        load_rows(job(dataset_name=str(tmp_path / "absent.jsonl")), "train")


def test_synthetic_sums_are_right_and_splits_differ():
    """The built-in set: correct, reproducible, no shared stream."""
    train, test = (load_rows(job(dataset_rows=64), split) for split in ("train", "test"))
    assert train == load_rows(job(dataset_rows=64), "train")
    assert train != test
    for row in train:
        left, right = row.members["answer"].split(" = ")
        a, b = left.split(" + ")
        assert int(a) + int(b) == int(right)


def test_plain_text_begins_as_its_tokenizer_begins_it():
    """A tokenizer that sets a mark of the beginning gets it in front of plain text, which no answer's span counts."""
    from tokenizers import processors

    tokenizer = load_tokenizer(JobConfig(tokenizer_name="builtin:bytes"))
    bare = encode(ROWS[4], tokenizer, job())
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, begin)]
    )
    assert list(encode(ROWS[4], tokenizer, job()).tokens) == [begin, *bare.tokens]
    example = encode(ROWS[1], tokenizer, job(completion_only_loss=True))
    assert example.tokens[0] == begin
    assert tokenizer.decode([x for x in example.labels if x != IGNORED]) == "Oui." + tokenizer.eos_token
    assert encode(ROWS[0], tokenizer, job()).tokens.tolist().count(begin) == 0  # a talk begins as its template says


@each_row(
    ("row", "word"),
    [
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, "two texts, or two lists"),
        ({"question": "a", "answer": 5}, "answer=5"),
        ({"messages": "hello"}, "role and content"),
        ({"messages": []}, "role and content"),
        ({"messages": [{"role": "user"}]}, "chat_template"),
    ],
)
def test_rows_of_a_known_shape_and_wrong_content_are_refused(tokenizer, row, word):
    """Neither trained on as the text of a list, nor a stack trace."""
    with pytest.raises(ConfigError, match=word):
        encode(row, tokenizer, job())


def test_a_hub_cannot_name_files_outside_its_data_set(tmp_path):
    """Refused before a file of such a name is made: `datasets` is shown the listing as empty files."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "a"}')
    code = "import sys; from contracts.job_config import JobConfig; from finetune import rows as sources; "
    code += "print(sources.find_files(JobConfig(dataset_name=sys.argv[1], dataset_revision='main'), 'train'))"
    hub = Hub()
    names = {"org/up": f"../../../../../../../../{tmp_path}/up.jsonl", "org/root": f"{tmp_path}/root.jsonl"}
    for name, path in names.items():
        hub.add("datasets", name, tmp_path / "set", listed=(path,))
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", code, name], env=environment, capture_output=True, text=True, check=False
        )
        assert "ConfigError" in done.stderr and "leads out of the data set" in done.stderr, done.stderr
    hub.close()
    assert not list(tmp_path.glob("*.jsonl"))
