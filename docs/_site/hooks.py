"""Hooks of the documentation site: the version in the header, and the parts of reference pages that come from the code.

The line `<!-- made: NAME -->` of a page is replaced by such a part. Specification: https://www.mkdocs.org/user-guide/configuration/#hooks.
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from agent.checks.findings import PAGES  # noqa: E402 - found by the path above

CODE = re.compile(r"(?<![\w./-])[a-z_]+\.[a-z_0-9.]+[a-z0-9]")  # as in "see pci.acs.on"


def on_config(config: Any) -> Any:
    """Add the version of the build to the name of the site, which the header shows."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    config.site_name = f"Topoflight {version}"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert the parts that come from the code, and link each code that an entry names to its own entry."""
    if page.file.src_uri in (f"reference/{name}.md" for name in PAGES):
        markdown = re.sub(r"^- \*\*.+$", lambda found: linked(found[0]), markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^<!-- made: ([a-z-]+) -->$", lambda found: MADE[found[1]](), markdown, flags=re.MULTILINE)
    return indented(markdown)


def indented(markdown: str) -> str:
    """Indent the content of list items by four blanks, as Python-Markdown requires; pages indent it by the marker."""
    lines, more = [], 0  # blanks to add to the lines of the current item
    for line in markdown.splitlines():
        if found := re.match(r"(\d+\. |- )", line):
            more = 4 - len(found[1])
        elif line and not line.startswith(" "):
            more = 0
        lines.append(" " * more + line if line.startswith(" ") else line)
    return "\n".join(lines) + "\n"


def linked(text: str) -> str:
    """Link each code in a line of an entry to its own entry, except between backticks."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(CODE.sub(_link, piece) if not piece.startswith("`") else piece for piece in pieces)


def _link(found: re.Match[str]) -> str:
    page = next((name for name in PAGES if f"### `{found[0]}`\n" in text_of(name)), None)
    return f"[{found[0]}]({page}.md#{found[0].replace('.', '')})" if page else found[0]


@cache
def text_of(name: str) -> str:
    """A page of entries."""
    return (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")


def cli_reference() -> str:
    """A section per command, from click: its help, its options and arguments."""
    import click

    from agent.cli.main import VERBS, cli

    parts = []
    for verb in VERBS:
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None  # noqa: S101 - a verb of the table
        context = click.Context(
            command, info_name=f"topoflight {verb}", max_content_width=10_000, terminal_width=10_000
        )
        usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
        help_text = inspect.cleandoc(command.help or "").partition("\f")[0]
        parts += [f"## {verb}", "", help_text, "", "```text", usage, "```", ""]
        rows = [record for one in command.params if (record := one.get_help_record(context)) is not None]
        if rows:
            parts += [
                "| option | meaning |",
                "|---|---|",
                *(f"| `{cell(name)}` | {cell(text)} |" for name, text in rows),
                "",
            ]
    return "\n".join(parts)


def http_reference() -> str:
    """A table of the endpoints, from the OpenAPI document of the agent."""
    from agent.http.server import create
    from agent.http.state import State

    document = create(State(lambda: (), interval_seconds=3600)).openapi()
    parts = ["| method and path | purpose | parameters |", "|---|---|---|"]
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            names = ", ".join(f"`{one['name']}`" for one in about.get("parameters", ()))
            parts.append(
                f"| `{method.upper()} {path}` | {cell(about.get('description') or about['summary'])} | {names} |"
            )
    return "\n".join(parts)


def cell(text: str) -> str:
    """Text that a table's cell can hold."""
    return (
        " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
        if "`" not in text
        else " ".join(text.replace("|", "\\|").split())
    )


MADE: dict[str, Callable[[], str]] = {"cli": cli_reference, "http": http_reference}
