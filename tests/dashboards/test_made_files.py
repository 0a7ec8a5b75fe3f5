"""What is made is committed as it is made."""

from __future__ import annotations

from pathlib import Path

import generate

ROOT = Path(__file__).parent.parent.parent


def test_making_again_gives_no_difference() -> None:
    """`python dashboards/generate.py` after a change of a source, and commit what it writes."""
    for name, text in generate.made().items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, f"{name}: run python dashboards/generate.py"
