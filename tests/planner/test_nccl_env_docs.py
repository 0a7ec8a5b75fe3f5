"""Every text of the findings on settings and of the advice is used."""

from __future__ import annotations

import ast
from pathlib import Path
from string import Formatter

from planner.lint.environment import settings
from planner.lint.values import texts
from planner.nccl_env.texts import texts as advice_texts


def test_every_text_is_used_and_filled_in() -> None:
    """Each text of findings.toml belongs to a rule, and every rule passes exactly the fields that its text has."""
    given: dict[str, set[str]] = {row["finding"]: {"effect"} for row in settings()["torch"].values()}
    for path in (Path(__file__).parents[2] / "planner" / "lint").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match call:
                case ast.Call(func=ast.Name("finding"), args=[ast.Constant(str(key)), *_], keywords=words):
                    fields = {word.arg for word in words if word.arg and word.arg != "status"}
                    assert fields == given.setdefault(key, fields), key
    wanted = {
        key: {name for _, name, _, _ in Formatter().parse(text["message"] + text["remedy"]) if name} - {"name", "value"}
        for key, text in texts().items()
    }
    assert given == wanted


def test_every_text_of_the_advice_is_used_and_filled_in() -> None:
    """Each text of advice.toml is named by a rule, and what a rule passes are fields of the texts that it names."""
    table, used = advice_texts(), set[str]()
    for path in (Path(__file__).parents[2] / "planner" / "nccl_env").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in table}
        for call in ast.walk(tree):
            match call:
                case ast.Call(func=ast.Name("note" | "setting" | "need" as kind), args=[ast.Constant(str(key)), *more]):
                    assert key in table and ("source" in table[key]) == (kind != "note"), key
                    fields = {name for _, name, _, _ in Formatter().parse(table[key]["text"]) if name}
                    given = {word.arg for word in call.keywords}
                    continued = any(isinstance(each, ast.Starred) for each in more)
                    assert fields <= given and (continued or fields == given), key
    assert used == set(table)
