"""The map of the agent's modules in docs/architecture.md names each of them once, and none that is gone."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_module_is_on_the_map_once() -> None:
    """In the table's second column; in the first stands no name."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| about | modules of `agent/` |")[2].partition("\n\n")[0]
    named = Counter(name for name in re.findall(r"`([a-z_]+)`", table))
    assert named == Counter({path.stem for path in (ROOT / "agent").glob("*.py")} - {"__init__"})
