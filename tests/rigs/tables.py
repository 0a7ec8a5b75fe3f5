"""A table of rows as one test, which names every row that fails. What pytest.mark.parametrize takes, taken as it does.

An item of pytest for each row costs a few milliseconds in every process that collects it; a thousand rows are seconds.
Each row has its own `tmp_path` and `monkeypatch`. Rows share all other fixtures of their test: where a row
changes what such a fixture gives, the test stays parametrized.
"""

import dataclasses
import functools
import inspect
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]  # of the repository
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def corpus_folder() -> Path:
    """The folder of real data; the test is skipped where it is not there."""
    path = Path(os.environ.get("TOPOFLIGHT_CORPUS", ROOT.parent / "shared" / "corpus"))
    if not path.is_dir():
        pytest.skip(f"no corpus at {path}; set TOPOFLIGHT_CORPUS")
    return path


def each_row(
    names: str | Sequence[str],
    values: Iterable[Any] | Callable[[], Iterable[Any]],
    ids: Sequence[str] | Callable[[Any], object] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test for each row, and raise all failures at once, each with a note of its row.

    If no row fails and at least one is skipped, the test counts as skipped.
    `values` may be a function that makes the rows when the test runs, where that takes long.
    """
    words = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    listed = list(ids) if ids is not None and not callable(ids) else None

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        taken = inspect.signature(test)

        @functools.wraps(test)
        def every(**fixtures: Any) -> None:
            table = list(values() if callable(values) else values)
            assert table, "a table without rows"
            assert not any(getattr(row, "marks", ()) for row in table), "a row cannot have marks: use parametrize"
            failures: list[BaseException] = []
            skipped: list[pytest.skip.Exception] = []
            for number, row in enumerate(table):
                given = row.values if hasattr(row, "marks") else (row,) if len(words) == 1 else row
                try:
                    with pytest.MonkeyPatch.context() as patch:
                        taking = dict(zip(words, given, strict=True))
                        test(**{**fixtures, **fresh(fixtures, number, patch), **taking})
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - raised with all others
                    error.add_note(f"row {number} of {test.__name__}: {name_of(number, row, given):.300}")
                    failures.append(error)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(table)} rows", failures)
            if skipped:
                raise skipped[0]

        del every.__wrapped__  # type: ignore[attr-defined]  # pytest would read the arguments of the rows there
        left = [each for name, each in taken.parameters.items() if name not in words]
        every.__signature__ = taken.replace(parameters=left)  # type: ignore[attr-defined]
        return every

    def fresh(fixtures: dict[str, Any], number: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What no two rows may share, of the fixtures that the test takes."""
        made: dict[str, Any] = {}
        if "tmp_path" in fixtures:
            made["tmp_path"] = fixtures["tmp_path"] / f"row-{number}"
            made["tmp_path"].mkdir()
        if "monkeypatch" in fixtures:
            made["monkeypatch"] = patch
        return made

    def name_of(number: int, row: Any, given: Sequence[Any]) -> str:
        if callable(ids):
            return str([ids(each) for each in given])
        return listed[number] if listed else getattr(row, "id", None) or repr(tuple(given))

    return decorate


def data_of(test: str, name: str) -> Any:
    """What is in a YAML, TOML or JSON file next to a test."""
    text = (Path(test).parent / name).read_text(encoding="utf-8")
    return {".yaml": yaml.safe_load, ".toml": tomllib.loads, ".json": json.loads}[Path(name).suffix](text)


def rows_of(test: str, name: str = "") -> Callable[[str], Callable[[], Any]]:
    """The tables of a YAML file next to a test, by their keys; `name` where the file has not the test's own name.

    The file is read when the first test that takes a table runs, not at collection.
    """
    tables = functools.cache(lambda: data_of(test, name or f"{Path(test).stem}.yaml"))
    return lambda key: lambda: tables()[key]


def plain(record: Any) -> Any:
    """A record as plain data: of a dataclass every member that is not its type's default."""
    if dataclasses.is_dataclass(record):
        members = {one.name: one for one in dataclasses.fields(record)}
        usual = {name: one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
                 for name, one in members.items()}  # fmt: skip
        return {name: plain(value) for name in members if (value := getattr(record, name)) != usual[name]}
    if isinstance(record, Mapping):
        return {str(name): plain(value) for name, value in record.items()}
    return [plain(one) for one in record] if isinstance(record, tuple | list) else record


def hold_file(path: Path, text: str, look: str = "read the difference") -> None:
    """Compare a file with what it should hold; TOPOFLIGHT_UPDATE_GOLDEN=1 rewrites it."""
    rewrite = "run this test with TOPOFLIGHT_UPDATE_GOLDEN=1"
    if os.environ.get("TOPOFLIGHT_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path} is missing: {rewrite}, which writes it"
    assert text == path.read_text(encoding="utf-8"), f"{path} differs: {look}. If it is intended, {rewrite}"


def golden_rows(name: str, key: str, read: Callable[[dict[str, Any]], Any]) -> None:
    """Read each row of tests/golden/NAME, a JSON object a line, and compare the result with the row's member `key`.

    TOPOFLIGHT_UPDATE_GOLDEN=1 rewrites the results; a new row needs `what` it shows and the input alone.
    """
    path = ROOT / "tests/golden" / name
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    made = [row | {key: json.loads(json.dumps(plain(read(row))))} for row in rows]
    if os.environ.get("TOPOFLIGHT_UPDATE_GOLDEN") == "1":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")
        return
    wrong = [(row["what"], row.get(key), new[key]) for row, new in zip(rows, made, strict=True) if row != new]
    assert wrong == []
