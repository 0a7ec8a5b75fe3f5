"""docs/metrics.md: the tables between its marks are made from the catalogue of metric families."""

from __future__ import annotations

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
    lines = [
        "## Families", "", f"Most series of one host: {symbols}.", "",
        "| family | kind | labels | at most | meaning | from |", "|---|---|---|---|---|---|",
        *(_row(family) for family in CATALOGUE),
        "", "## Labels", "", "| label | holds | values at most |", "|---|---|---|",
        *(f"| `{name}` | {text} | {count or 'follows from the others'} |" for name, (text, count) in LABELS.items()),
        "", f"Never used, because they are the scraper's: {never}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return (
        f"| `{family.exposed}` | {family.kind} | {labels} | {' × '.join(family.bound) or '1'} | "
        f"{family.help} | {family.source} |"
    )
