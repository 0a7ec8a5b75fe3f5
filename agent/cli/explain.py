"""The verb explain."""

from __future__ import annotations

import click

from agent.base.output import console


@click.command()
@click.argument("code", required=False)
@click.option("--list", "listed", is_flag=True, help="List all codes and alerts, each with its meaning.")
def explain(code: str | None, listed: bool) -> None:
    """Explain a finding, a log problem, a diagnosis or an alert: its meaning, its cause and its remedy."""
    from agent.base.tables import explanation
    from agent.checks.explain import UnknownCodeError, point, section, sections

    if listed == (code is not None):
        raise click.UsageError("Give either one CODE or --list.")
    if code is None:
        for name in sections():
            click.echo(f"{name:36} {point(name, 'Meaning')}")
        return
    try:
        explanation(console(), section(code))
    except UnknownCodeError as error:
        raise click.UsageError(str(error)) from None
