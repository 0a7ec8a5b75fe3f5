"""The documentation site: it builds without a warning, loads nothing from another host, and has what others link to."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from alerts import ALERTS, DOCS

from agent.checks.explain import sections
from agent.cli.main import VERBS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it."""
    made = tmp_path_factory.mktemp("site")
    (recipe,) = re.findall(r"^docs: \$\(READY\)\n\t\$\(BIN\)/mkdocs (.+)$", (ROOT / "Makefile").read_text(), re.M)
    command = [sys.executable, "-m", "mkdocs", *recipe.split(), "--site-dir", str(made)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def test_every_page_shows_the_version_and_loads_nothing_from_elsewhere(site: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"(\w+:[^\"]*)\"", text)
        links = re.findall(r"<link [^>]*>", text)
        loaded += [tag for tag in links if "://" in tag and not re.search(r'rel="(canonical|prev|next)"', tag)]
        assert not loaded and "```" not in text[text.index("<article") : text.index("</article>")], page
        header = text[text.index("<header") : text.index("</header>")]
        assert f"Topoflight {version}" in header and "data-md-toggle" in text, page
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?https?:", sheet.read_text(encoding="utf-8")), sheet


def test_what_others_link_to_is_there(site: Path) -> None:
    """Each alert's runbook_url, a heading for each code that `explain` knows, and a section for each command."""
    texts = {page: page.read_text(encoding="utf-8") for page in sorted((site / "reference").rglob("*.html"))}
    for alert in ALERTS:
        path, _, anchor = alert.rule["annotations"]["runbook_url"].removeprefix(f"{DOCS}/").partition("#")
        assert f'id="{anchor}"' in texts[site / path / "index.html"], alert.name
    headings = re.findall(r"<h[23] id=\"([^\"]+)\"", "".join(texts.values()))
    assert [name for name in sections() if name.startswith("Topoflight") and name.lower() not in headings] == []
    assert set(VERBS) <= set(re.findall(r"<h2 id=\"([^\"]+)\"", texts[site / "reference/cli/index.html"]))
