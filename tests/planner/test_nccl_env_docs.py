"""docs/nccl-env.md says what the code does."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from string import Formatter

from planner.lint.tables import CODES, settings, texts

PAGE = (Path(__file__).parent.parent.parent / "docs" / "nccl-env.md").read_text(encoding="utf-8")


def test_every_code_has_its_row() -> None:
    """The page lists every code."""
    assert sorted(re.findall(r"`(env\.[a-z0-9_.]+)`", PAGE)) == list(CODES)


def test_every_text_is_used_and_filled_in() -> None:
    """Each text of findings.toml belongs to a rule, and every rule passes exactly the fields that its text has."""
    given: dict[str, set[str]] = {row.finding: {"effect"} for row in settings().torch.values()}
    for path in (Path(__file__).parents[2] / "planner" / "lint").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match call:
                case ast.Call(func=ast.Name("finding"), args=[ast.Constant(str(key)), *_], keywords=words):
                    fields = {word.arg for word in words if word.arg and word.arg != "status"}
                    assert fields == given.setdefault(key, fields), key
    wanted = {
        key: {name for _, name, _, _ in Formatter().parse(text.message + text.remedy) if name} - {"name", "value"}
        for key, text in texts().items()
    }
    assert given == wanted
