"""Where rows come from: JSON lines, JSON and parquet files, folders of them, data sets of a hub, one built-in set.

Surface: the files, laid out and named as data sets of the hub are: `train.jsonl`, `main/train-00000-of-00001.parquet`,
or as the `configs` in the front matter of README.md say. Parquet is read by pyarrow.
"""

from __future__ import annotations

import fnmatch
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from contracts.job_config import ConfigError, JobConfig, parse_mapping
from finetune import hub

FORMATS = (".jsonl", ".json", ".parquet")
# Every rank keeps its rows in memory, as tokens some thirty times their bytes: more than this is the wrong file.
MAX_BYTES = 4 << 30
BATCH = 1024  # parquet rows that are unpacked at a time
COLUMNS = ("messages", "prompt", "completion", "question", "answer")  # and dataset_text_field


def load_rows(config: JobConfig, split: str) -> list[dict[str, Any]]:
    """The rows of one split, at most dataset_rows."""
    name, path = config.dataset_name, Path(config.dataset_name).expanduser()
    if name == "synthetic:arithmetic":
        rows = _sums(config.dataset_rows or 1024, split)
    else:
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = _in_folder(path, config.dataset_config, split)
        elif path.suffix in FORMATS:
            raise ConfigError(f"dataset_name={name!r}: no such file")
        else:
            files = _on_hub(config, split)
        found = (_whole(row, file) for file in files for row in _read_file(file, config))
        rows = list(islice(found, config.dataset_rows))
    if not rows:
        raise ConfigError(f"dataset_name={name!r}: split {split!r} holds no rows")
    return rows


def _sums(count: int, split: str) -> list[dict[str, Any]]:
    """Sums of two numbers below 100; train and test draw from different streams."""
    draw = random.Random(f"sums {split}")  # noqa: S311  a data set, not a secret
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return [{"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}"} for a, b in pairs]


def _in_folder(folder: Path, part: str | None, split: str) -> list[Path]:
    files = {f.relative_to(folder).as_posix(): f for f in folder.rglob("*") if f.suffix in FORMATS and f.is_file()}
    card = folder / "README.md"
    return [
        files[name] for name in choose_files(list(files), card if card.is_file() else None, part, split, str(folder))
    ]


def _on_hub(config: JobConfig, split: str) -> list[Path]:
    name, revision = config.dataset_name, config.dataset_revision
    where = f"dataset_name={name!r}"
    sizes = hub.list_files(name, revision)
    if not any(path.endswith(FORMATS) for path in sizes):
        revision = hub.CONVERTED  # what the hub itself made of CSV, text and the like
        sizes = hub.list_files(name, revision, absent=f"{where}: holds no {', '.join(FORMATS)} file")
    card = hub.fetch(name, "README.md", revision) if "README.md" in sizes else None
    chosen = choose_files([p for p in sizes if p.endswith(FORMATS)], card, config.dataset_config, split, where)
    _bound(sum(sizes[path] for path in chosen), where)
    return [hub.fetch(name, path, revision) for path in chosen]


def choose_files(paths: Sequence[str], card: Path | None, part: str | None, split: str, where: str) -> list[str]:
    """The files of one split, of the named part of the data set (dataset_config) where it has several."""
    if card and (parts := _parts(card, where)):
        return _of_card(parts, paths, part, split, where)
    return _by_name(paths, part, split, where)


def _of_card(
    parts: dict[str, dict[str, list[str]]], paths: Sequence[str], part: str | None, split: str, where: str
) -> list[str]:
    if part is None and len(parts) > 1 and "default" not in parts:
        raise ConfigError(f"{where}: dataset_config must be one of {', '.join(sorted(parts))}")
    part = part or ("default" if "default" in parts else next(iter(parts)))
    if part not in parts:
        raise ConfigError(f"{where}: dataset_config={part!r}: must be one of {', '.join(sorted(parts))}")
    if split not in parts[part]:
        raise ConfigError(f"{where}: no split {split!r}: {part} has {', '.join(sorted(parts[part]))}")
    wanted = parts[part][split]
    found = sorted(p for p in paths if any(fnmatch.fnmatchcase(p, w.removeprefix("./")) for w in wanted))
    if not found:
        raise ConfigError(f"{where}: no {', '.join(FORMATS)} file matches {', '.join(wanted)} (README.md)")
    return found


def _by_name(paths: Sequence[str], part: str | None, split: str, where: str) -> list[str]:
    if part is not None and any(part in path.split("/")[:-1] for path in paths):
        paths = [path for path in paths if part in path.split("/")[:-1]]
    named = [p for p in paths if Path(p).stem.split("-")[0] == split or split in p.split("/")[:-1]]
    if not named and split == "train" and len(paths) == 1:
        return list(paths)
    if not named:
        raise ConfigError(f"{where}: no {', '.join(FORMATS)} file named after the split {split!r}")
    if part is None and len({str(Path(p).parent) for p in named if split not in p.split("/")[:-1]}) > 1:
        folders = sorted({Path(p).parts[0] for p in named if "/" in p})
        raise ConfigError(
            f"{where}: several folders hold {split!r}; dataset_config must be one of {', '.join(folders)}"
        )
    return sorted(named)


def _parts(card: Path, where: str) -> dict[str, dict[str, list[str]]]:
    """Part -> split -> patterns, from the card's `configs`; empty where it says nothing of files."""
    with card.open(encoding="utf-8", errors="replace") as file:
        text = file.read(1 << 20)
    if not text.startswith("---"):
        return {}
    metadata = parse_mapping(text[3:].split("\n---", 1)[0].strip() or "{}", f"{where}: README.md")
    parts: dict[str, dict[str, list[str]]] = {}
    try:
        for one in metadata.get("configs") or ():
            files = one.get("data_files")
            if files is None:
                continue
            if isinstance(files, str) or all(isinstance(item, str) for item in files):
                files = {"train": files} if not isinstance(files, dict) else files
            pairs = files.items() if isinstance(files, dict) else ((item["split"], item["path"]) for item in files)
            parts[str(one["config_name"])] = {str(at): _patterns(p) for at, p in pairs}
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{where}: README.md: configs: {type(error).__name__}: {error}") from None
    return parts


def _patterns(value: object) -> list[str]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise TypeError(f"path must be text or a list of text, is {str(value)[:80]!r}")
    return listed


def _read_file(path: Path, config: JobConfig) -> Iterator[dict[str, Any]]:
    reader: Callable[..., Iterable[Any]] = _parquet if path.suffix == ".parquet" else _json
    for number, row in enumerate(reader(path, (*COLUMNS, config.dataset_text_field)), 1):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}: row {number}: every row must be a mapping, this is {type(row).__name__}")
        yield row


def _json(path: Path, _columns: Sequence[str]) -> Iterator[Any]:
    """JSON lines, or one list."""
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            if file.read(1) == "[":
                _bound(path.stat().st_size, path)
                yield from json.loads("[" + file.read())
                return
            file.seek(0)
            size = 0
            for number, line in enumerate(file, 1):  # noqa: B007  told below
                size += len(line)
                _bound(size, path)
                if line.strip():
                    yield json.loads(line)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not JSON lines: {f'line {number}: ' if number else ''}{error}") from None


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Only the columns that the job reads, a batch at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{path}: parquet needs pyarrow: pip install 'topoflight[parquet]' (.jsonl needs nothing)"
        ) from None
    size = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            kept = [name for name in names if name in columns] or names  # none: let encode name what there is
            for batch in file.iter_batches(batch_size=BATCH, columns=kept):
                size += batch.nbytes
                _bound(size, path)
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not parquet: {str(error).splitlines()[0]}") from None


def _bound(size: int, where: object) -> None:
    if size > MAX_BYTES:
        raise ConfigError(f"{where}: more than {MAX_BYTES >> 30} GiB of rows in one split: set dataset_rows, or cut it")


def _whole(value: Any, path: Path, depth: int = 0) -> Any:
    """Without the nulls that a table puts where a row says nothing."""
    if depth > 8:  # messages hold lists of mappings of text: nothing is as deep
        raise ConfigError(f"{path}: a row is nested more than 8 deep")
    if isinstance(value, dict):
        return {key: _whole(one, path, depth + 1) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_whole(one, path, depth + 1) for one in value]
    return value
