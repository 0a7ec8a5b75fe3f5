"""docs/nccl-env.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from planner.lint.environment import CODES

PAGE = (Path(__file__).parent.parent.parent / "docs" / "nccl-env.md").read_text(encoding="utf-8")


def test_every_code_has_its_row() -> None:
    """The page lists every code."""
    assert sorted(re.findall(r"`(env\.[a-z0-9_.]+)`", PAGE)) == list(CODES)


def test_codes_are_the_ones_in_the_source() -> None:
    """No finding is made under a code that is not announced, and none is announced that is never made."""
    used: set[str] = set()
    folder = Path(__file__).parent.parent.parent / "planner" / "lint"
    for path in (*folder.glob("*.py"), *folder.glob("data/*.toml")):
        text = re.sub(r"_CODES = \([^)]*\)", "", path.read_text(encoding="utf-8"))
        used |= set(re.findall(r'"(env\.[a-z0-9_]+\.[a-z0-9_]+)"', text))
    assert used == set(CODES)
