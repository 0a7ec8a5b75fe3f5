"""`each_row`: a failing row is reported by its name, the others run all the same, and what must be fresh is fresh."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.tables import each_row


def notes_of(test: Callable[..., None], **fixtures: Any) -> list[str]:
    """The notes of the failures that a test raises together."""
    with pytest.raises(BaseExceptionGroup) as raised:
        test(**fixtures)
    return [" ".join(error.__notes__) for error in raised.value.exceptions]


@pytest.mark.parametrize(
    ("ids", "names"),
    [(None, ["(0,)", "named"]), (["zero", "one", "two"], ["zero", "two"]), (lambda n: f"<{n}>", ["<0>", "<2>"])],
    ids=["of the row", "listed", "called"],
)
def test_every_failing_row_is_reported_by_its_name(ids: Any, names: list[str]) -> None:
    seen = []

    @each_row("number", [0, 1, pytest.param(2, id="named")], ids=ids)
    def test(number: int) -> None:
        seen.append(number)
        if number == 2:
            pytest.fail("as pytest says it")
        assert number == 1

    notes = notes_of(test)
    assert seen == [0, 1, 2], "the rows after a failing one run"
    assert len(notes) == 2 and all(name in note for name, note in zip(names, notes, strict=True)), notes


def test_rows_that_are_made_late_and_no_rows_at_all() -> None:
    made: list[int] = []

    @each_row(("a", "b"), lambda: [(1, made.append(1))])
    def late(a: int, b: None) -> None:
        assert (a, b) == (1, None)

    assert made == [], "rows of a function are made when the test runs"
    late()
    assert made == [1]
    with pytest.raises(AssertionError, match="without rows"):
        each_row("a", [])(lambda a: None)()
    with pytest.raises(AssertionError, match="cannot have marks"):
        each_row("a", [pytest.param(1, marks=pytest.mark.nightly)])(lambda a: None)()


def test_a_skipped_row_hides_neither_a_failure_nor_the_rows_after_it() -> None:
    seen = []

    @each_row("number", [0, 1, 2])
    def test(number: int, failing: int) -> None:
        seen.append(number)
        if number == 1:
            pytest.skip("not here")
        assert number != failing

    assert len(notes_of(test, failing=0)) == 1
    with pytest.raises(pytest.skip.Exception, match="not here"):
        test(failing=9)
    assert seen == [0, 1, 2] * 2


folders: list[Path] = []


@each_row("outer", ["a", "b"])
@each_row("inner", ["a", "b"])
def test_folder_and_patches_are_fresh_for_each_row(
    outer: str, inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(tmp_path.iterdir()) == [] and "OF_ONE_ROW" not in os.environ
    monkeypatch.setenv("OF_ONE_ROW", outer + inner)
    (tmp_path / "file").touch()
    folders.append(tmp_path)
    assert len(set(folders)) == len(folders)
