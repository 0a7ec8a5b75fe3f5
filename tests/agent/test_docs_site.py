"""The reference pages and the site: one full entry for every code and alert, no warning, nothing from another host."""

import re
import tomllib

import pytest
from alerts import ALERTS, DOCS
from click.testing import CliRunner
from rigs.command import interpreter
from rigs.tables import ROOT, each_row

from agent.checks.findings import PAGES, read_entries
from agent.checks.history import AT_ONCE
from agent.checks.measured import ALL_CODES
from agent.cli.main import VERBS, explain
from collectives.nccl_log.codes import CODES as LOG_CODES
from planner.lint.findings import CODES as ENV_CODES, TEXTS


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built as `make docs` builds it."""
    made = tmp_path_factory.mktemp("site")
    (recipe,) = re.findall(r"^docs: \$\(READY\)\n\t\$\(BIN\)/mkdocs (.+)$", (ROOT / "Makefile").read_text(), re.M)
    done = interpreter("-m", "mkdocs", *recipe.split(), "--site-dir", made)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def test_every_page_shows_the_version_and_loads_nothing_from_elsewhere(site):
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


def test_what_others_link_to_is_there(site):
    """Each alert's runbook_url, a heading for each code that `explain` knows, and a section for each command."""
    texts = {page: page.read_text(encoding="utf-8") for page in sorted((site / "reference").rglob("*.html"))}
    for alert in ALERTS:
        path, _, anchor = alert.rule["annotations"]["runbook_url"].removeprefix(f"{DOCS}/").partition("#")
        assert f'id="{anchor}"' in texts[site / path / "index.html"], alert.name
    headings = re.findall(r"<h[23] id=\"([^\"]+)\"", "".join(texts.values()))
    assert [name for name in read_entries() if name.startswith("Topoflight") and name.lower() not in headings] == []
    assert set(VERBS) <= set(re.findall(r"<h2 id=\"([^\"]+)\"", texts[site / "reference/cli/index.html"]))


@each_row("page", sorted((ROOT / "docs" / "how-to").glob("*.md")))
def test_a_how_to_guide_has_goal_prerequisites_commands_verify_and_undo(page):
    text = page.read_text(encoding="utf-8")
    parts = (r"\*\*Goal:\*\* ", r"\*\*Prerequisites:\*\* ", r"^ *```(console|sh)$", r"\b[Vv]erify",
             r"\b([Uu]ndo|Uninstall)\b")  # fmt: skip
    assert [part for part in parts if not re.search(part, text, re.M)] == []


PARTS = ["Meaning", "Cause", "Confirm", "Remedy", "Severity"]
GATE = {code for code in ALL_CODES if not code.startswith("env.")}


def headings(name: str) -> list[str]:
    return re.findall(
        r"^### `([^`]+)`$", (ROOT / f"docs/reference/{name}.md").read_text(encoding="utf-8"), re.MULTILINE
    )


def diagnoses() -> set[str]:
    """Codes that `why` gives its causes: literals of the sources, and of the tests where the code builds them."""
    places = [*(ROOT / "planner/why").glob("*.py"), *(ROOT / "agent/why").glob("*.py"), ROOT / "tests/why/test_why.py"]
    text = "".join(place.read_text(encoding="utf-8") for place in places)
    found = set(re.findall(r"\"((?:rank|ranks|call|link|all|timeout|step|model|rendezvous)\.[a-z]+)\"", text))
    words = tomllib.loads((ROOT / "planner/why/why.toml").read_text(encoding="utf-8"))
    found |= {*words["code"].values(), *(row["code"] for row in words["cause"].values() if "_" not in row["code"])}
    return found | set(re.findall(r"code=\"([a-z]+)\"", text))


def test_every_code_has_one_entry_on_its_page() -> None:
    """No code without an entry, no entry without a code, none twice. The message names the page to edit."""
    pages = {name: headings(name) for name in PAGES}
    codes = {"findings": GATE, "settings": {*ENV_CODES}, "log-problems": {*LOG_CODES},
             "diagnoses": diagnoses() | {*pages["diagnoses"]}}  # fmt: skip
    wrong = [f"docs/reference/{page}.md: {'add' if code in wanted else 'remove'} the entry ### `{code}`"
             for page, wanted in codes.items() for code in sorted(wanted ^ {*pages[page]})]  # fmt: skip
    assert not wrong, "\n".join(wrong)
    assert pages["alerts"] == [alert.name for alert in ALERTS] and set(AT_ONCE) <= GATE
    assert len(read_entries()) == sum(map(len, pages.values()))


@each_row("name", sorted(read_entries()))
def test_an_entry_is_whole(name: str) -> None:
    """Each point once, in order, in sentences; the severities are those of the code."""
    points = re.findall(r"^- \*\*(\w+):\*\* (\S.*)$", read_entries()[name], flags=re.MULTILINE)
    assert [point for point, _ in points] == PARTS + (["Once"] if name in AT_ONCE else [])
    assert all(text.endswith(".") for _, text in points), points
    told = re.findall(r"[a-z]+", dict(points)["Severity"].partition(".")[0])
    if name in LOG_CODES:
        assert told == [LOG_CODES[name].severity]
    elif name in ENV_CODES:
        assert {text["status"] for key, text in TEXTS.items() if key.partition("/")[0] == name} - {None} <= set(told)


def test_files_that_the_guides_of_contributors_name_exist() -> None:
    """Of the repository, or below tests/ as in the table of files that take long."""
    text = "".join((ROOT / page).read_text("utf-8") for page in ("CONTRIBUTING.md", "docs/explanation/architecture.md"))
    named = set(re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|toml|yaml|md|j2|tsv))`", text)) - {"agent/base/verbs/VERB.toml"}
    assert [name for name in sorted(named) if not ((ROOT / name).exists() or (ROOT / "tests" / name).exists())] == []


def test_named_codes_exist() -> None:
    """An entry that sends the reader to another code sends it to one that is there."""
    firsts = "|".join(sorted({code.split(".")[0] for code in GATE}))
    text = re.sub(r"`[^`]*`", "", "".join(read_entries().values()))  # file names such as run.json are in code
    named = set(re.findall(rf"(?<![\w.])(?:{firsts})(?:\.[a-z_0-9]+)+\b", text))
    assert named - read_entries().keys() == set()
    assert "limits.memlock.low" in named


def test_explain_prints_the_entry() -> None:
    """`topoflight explain CODE` answers for every code and lists all of them."""
    for code in read_entries():
        result = CliRunner().invoke(explain, [code])
        assert result.exit_code == 0 and result.output.startswith(f"{code}\n"), code
        assert all(f"{part}:" in result.output for part in PARTS), code
        assert max(map(len, result.output.splitlines())) <= 80, code
    listed = CliRunner().invoke(explain, ["--list"])
    assert [line.split()[0] for line in listed.output.splitlines()] == list(read_entries())
