"""Load the rows of a data set: JSON, JSON lines, parquet and CSV files, folders of them, hub ids, one built-in set.

Surface: `datasets` finds the files of a split, by their names or by the `configs` in the front matter of README.md, and
reads them as a stream. Nothing is written into its cache, and it never asks the hub: files come through `finetune.hub`.
"""

from __future__ import annotations

import csv
import json
import logging
import random
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from contracts.job_config import ConfigError, JobConfig, parse_mapping
from finetune import hub

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}  # suffix -> builder of `datasets`
# Every rank holds its rows in memory, as tokens about thirty times their bytes: more than this is the wrong file.
MAX_BYTES = 4 << 30
BATCH = 1024  # parquet rows that are unpacked at a time
COLUMNS = ("messages", "prompt", "completion", "question", "answer")  # and dataset_text_field
MOST_LEVELS = 8  # messages hold lists of mappings of text: nothing is nested as deep


class Row(NamedTuple):
    """One row of a data set, without null members, and where it comes from."""

    file: str
    number: int  # within the file, from 1
    members: dict[str, Any]


def load_rows(config: JobConfig, split: str) -> list[Row]:
    """Return the rows of one split, at most dataset_rows. Raises ConfigError that names the file and the row."""
    if config.dataset_name == "synthetic:arithmetic":
        sums = enumerate(_make_sums(config.dataset_rows or 1024, split), 1)
        return [Row(config.dataset_name, number, members) for number, members in sums]
    found = (row for path in find_files(config, split) for row in _read_file(path, config))
    rows, size = [], 0
    for row in islice(found, config.dataset_rows):
        size += len(repr(row.members))
        _check_size(size, row.file)
        rows.append(row)
    if not rows:
        raise ConfigError(f"dataset_name={config.dataset_name!r}: split {split!r} holds no rows")
    return rows


def _make_sums(count: int, split: str) -> list[dict[str, Any]]:
    """Sums of two numbers below 100; train and test draw from different streams."""
    draw = random.Random(f"sums {split}")  # noqa: S311  a data set, not a secret
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return [{"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}"} for a, b in pairs]


def find_files(config: JobConfig, split: str) -> list[Path]:
    """Return the files of one split, fetched from the hub where the name is an id. Raises ConfigError."""
    name, path = config.dataset_name, Path(config.dataset_name).expanduser()
    where = f"dataset_name={name!r}"
    if path.is_file():
        return [path]
    if path.is_dir():
        return [path / one for one in files_of_split(path, config.dataset_config, split, where)]
    if path.suffix in READERS:
        raise ConfigError(f"{where}: no such file")
    revision = config.dataset_revision
    sizes = hub.list_files(name, revision)
    with tempfile.TemporaryDirectory() as folder:  # `datasets` looks at names only: empty files show it the repository
        for one in sizes:
            place = Path(folder) / one
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        if "README.md" in sizes:
            (Path(folder) / "README.md").write_bytes(hub.fetch(name, "README.md", revision).read_bytes())
        chosen = files_of_split(Path(folder), config.dataset_config, split, where)
    _check_size(sum(sizes[one] for one in chosen), where)
    return [hub.fetch(name, one, revision) for one in chosen]


def files_of_split(folder: Path, part: str | None, split: str, where: str) -> list[str]:
    """Paths in a folder of one split, of the part `part` (dataset_config), by `datasets`' rules. Raises ConfigError."""
    import datasets

    _check_card(folder / "README.md", where)
    subfolder = part if part and (folder / part).is_dir() else None
    try:
        parts = datasets.get_dataset_config_names(str(folder))
        has_card = parts != ["default"]
        if has_card and part not in parts and (part is not None or (len(parts) > 1 and "default" not in parts)):
            wrong = "dataset_config" if part is None else f"dataset_config={part!r}:"
            raise ConfigError(f"{where}: {wrong} must be one of {', '.join(sorted(parts))}")
        with tempfile.TemporaryDirectory() as cache:
            options = {"name": part} if has_card else {"data_dir": subfolder}
            found = datasets.load_dataset_builder(str(folder), cache_dir=cache, **options).config.data_files or {}
    except ConfigError:
        raise
    except Exception as error:  # any kind: `datasets` passes on what YAML, pyarrow and its own code raise
        in_card = "README.md: " if (folder / "README.md").is_file() else ""
        raise ConfigError(f"{where}: {in_card}{_first_line(error).replace(f'{folder}/', '')}") from error
    if split not in found:
        raise ConfigError(f"{where}: no split {split!r}: {part or 'it'} has {', '.join(sorted(map(str, found)))}")
    names = [Path(one).relative_to(folder).as_posix() for one in found[split] if Path(one).suffix in READERS]
    if not names:
        raise ConfigError(f"{where}: no {', '.join(READERS)} file in split {split!r}")
    tops = sorted({one.partition("/")[0] for one in names if "/" in one})
    if part is None and not has_card and len(tops) > 1:
        raise ConfigError(f"{where}: several folders hold {split!r}; dataset_config must be one of {', '.join(tops)}")
    return names


def _check_card(card: Path, where: str) -> None:
    """Refuse front matter that is no YAML mapping, or whose aliases multiply: `datasets` reads it without bounds."""
    if card.is_file():
        with card.open(encoding="utf-8", errors="replace") as file:
            text = file.read(1 << 20)
        if text.startswith("---"):
            parse_mapping(text[3:].split("\n---", 1)[0].strip() or "{}", f"{where}: README.md")


def _read_file(path: Path, config: JobConfig) -> Iterator[Row]:
    """Stream the rows of one file; of parquet only the columns that the job reads."""
    import datasets
    import pyarrow.parquet

    kind, number = READERS.get(path.suffix), 0
    if kind is None:
        raise ConfigError(f"{path}: must be one of {', '.join(READERS)}")
    options: dict[str, Any] = {}
    datasets.logging.set_verbosity(logging.CRITICAL)  # its lines say less than the ConfigError
    try:
        if kind == "csv":  # every cell is text, also "2" and "NA"
            with path.open(encoding="utf-8", newline="") as file:
                names = next(csv.reader(file), [])
            features = datasets.Features({name: datasets.Value("string") for name in names})
            options = {"features": features, "keep_default_na": False}
        if kind == "parquet":
            names = pyarrow.parquet.read_schema(path).names
            wanted = [name for name in names if name in (*COLUMNS, config.dataset_text_field)]
            options = {"columns": wanted or None, "batch_size": BATCH}
        if kind == "json" and _starts_with_list(path):  # which `datasets` reads whole
            _check_size(path.stat().st_size, path)
        if kind != "parquet" and not path.stat().st_size:
            return
        with tempfile.TemporaryDirectory() as cache:
            rows = datasets.load_dataset(
                kind, data_files=str(path), split="train", streaming=True, cache_dir=cache, **options
            )
            for number, members in enumerate(rows, 1):
                yield Row(str(path), number, _without_nulls(members, f"{path}: row {number}"))
    except ConfigError:
        raise
    except Exception as error:  # any kind: pyarrow's, pandas' and `datasets`' own
        if isinstance(error, OSError) and error.errno in hub.DISK_ERRORS:
            raise
        if kind == "json":
            _check_json(path)
        raise ConfigError(f"{path}: not {kind}, after row {number}: {_first_line(error)}") from error


def _check_size(size: int, where: object) -> None:
    if size > MAX_BYTES:
        raise ConfigError(f"{where}: more than {MAX_BYTES >> 30} GiB of rows in one split: set dataset_rows, or cut it")


def _without_nulls(value: Any, where: str, level: int = 0) -> Any:
    """A value without the nulls that a table has where a row says nothing."""
    if level > MOST_LEVELS:
        raise ConfigError(f"{where}: nested more than {MOST_LEVELS} deep")
    if isinstance(value, dict):
        return {key: _without_nulls(one, where, level + 1) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one, where, level + 1) for one in value]
    return value


def _starts_with_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == b"["


def _check_json(path: Path) -> None:
    """Raise ConfigError that names the line of JSON lines which is no mapping: `datasets` names none."""
    if _starts_with_list(path):
        return
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):  # noqa: B007  named in the error
                if line.strip() and not isinstance(row := json.loads(line), dict):
                    raise ValueError(f"every row must be a mapping, this is {type(row).__name__}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON lines: line {number}: {error}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:500]
