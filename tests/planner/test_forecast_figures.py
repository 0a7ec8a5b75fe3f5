"""The figures that documents cite are those of `make forecast`; the widths that ship are learned from its errors."""

import re

import pytest
from rigs.command import ROOT, interpreter

from planner.forecast.calibration import widths

PAGE = ROOT / "docs" / "measurements" / "forecast.md"


def tables(text: str) -> dict[str, dict[str, list[str]]]:
    """Cells by the table's title and the row's first cell (with the second, where the first repeats)."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        rows: dict[str, list[str]] = {}
        for line in body.splitlines():
            if line.startswith("|") and not line.startswith(("|-", "| -")):
                first, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
                rows[f"{first} {cells[0]}" if first in rows else first] = cells
        found[title.strip()] = rows
    return found


def value(cell: str) -> float | str:
    """A number, a percentage in points, or the words themselves."""
    match = re.fullmatch(r"(-?[\d.]+)%?", cell)
    return float(match[1]) if match else cell


def test_documents_cite_the_figures_of_the_page() -> None:
    """Each row of the page's summary is in docs/explanation/forecast.md; README cites nothing else."""
    summary = tables(PAGE.read_text(encoding="utf-8"))["Summary"]
    model = (ROOT / "docs/explanation/forecast.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", model, re.MULTILINE))
    for name, (figure,) in list(summary.items())[1:]:
        assert rows.get(name) == figure.replace("%", " %"), name
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    cited = re.findall(r"([\d.]+) %", readme[readme.index("`make forecast` tests") :][:400])
    assert cited and set(cited) <= {cells[0].rstrip("%") for cells in summary.values()}


def test_the_page_has_the_widths_that_ship() -> None:
    """Written by one command."""
    kinds = tables(PAGE.read_text(encoding="utf-8"))["Width of the interval by the kind of job"]
    table = widths()
    for name, sigma in table.kinds.items():
        assert float(kinds[name][2]) == pytest.approx(sigma, abs=1e-3)
        # the rows of one source alone may be covered more than they would be by their own width
        assert 75 <= float(kinds[name][3].rstrip("%")) <= 95
    others = {
        "one step of the stack measured": table.calibrated, "difference of two layouts of one job": table.pair,
        "the same, of the same degrees": table.pair_same,
        **{f"memory: {method}": sigma for method, sigma in table.memory.items()},
    }  # fmt: skip
    for name, sigma in others.items():
        assert float(kinds[name][2]) == pytest.approx(sigma, abs=1e-3), name


@pytest.mark.nightly
@pytest.mark.corpus
def test_the_page_is_what_the_command_prints(corpus):
    """Percentages within 1.5 points, counts and widths within what that allows: a term that moved is written again."""
    if not (corpus / "layouts" / "published3.csv").is_file():
        pytest.skip(f"no published rows in {corpus}")
    done = interpreter("bench/forecast.py", seconds=850, TOPOFLIGHT_CORPUS=str(corpus))
    assert done.returncode == 0, done.stderr
    printed, page = tables(done.stdout), tables(PAGE.read_text(encoding="utf-8"))
    assert printed.keys() == page.keys()
    for title, rows in page.items():
        assert printed[title].keys() == rows.keys(), title
        for name, cells in rows.items():
            for now, then in zip(map(value, printed[title][name]), map(value, cells), strict=True):
                if isinstance(now, str) or isinstance(then, str):
                    continue
                assert now == pytest.approx(then, abs=1.5), (title, name)
