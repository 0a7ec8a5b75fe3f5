"""docs/metrics.md: the tables between its marks are made from the catalogue of metric families."""

from __future__ import annotations

from itertools import groupby

from agent.metrics.catalogue import CATALOGUE, FORBIDDEN_LABELS, LABELS, SYMBOLS, Family

BEGIN, END = "<!-- made by dashboards/generate.py -->", "<!-- end of what is made -->"


def page(old: str) -> str:
    """The page with its made part renewed."""
    head, _, rest = old.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{_tables()}\n{END}{tail}"


def _tables() -> str:
    never = ", ".join(f"`{name}`" for name in sorted(FORBIDDEN_LABELS))
    symbols = "; ".join(f"{symbol} {meaning}" for symbol, meaning in SYMBOLS.items())
    lines = ["## Families", ""]
    for source, families in groupby(CATALOGUE, key=lambda family: family.source):
        lines += [f"### {source}", "", *(_line(family) for family in families), ""]
    lines += [
        "## Labels", "",
        f"In brackets the most values on one host: {symbols}.", "",
        *(f"- `{name}`{f' ({count})' if count else ''}: {text}" for name, (text, count) in LABELS.items()),
        "", f"Never used, because they are the scraper's: {never}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _line(family: Family) -> str:
    labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
    return f"- `{family.exposed}{labels}`: {family.help}"
