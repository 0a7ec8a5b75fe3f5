"""The verb explain."""

from __future__ import annotations

import click

from agent.base.output import console


@click.command()
@click.argument("code")
def explain(code: str) -> None:
    """Explain a finding CODE or an alert: what it means, how to see it and what mends it."""
    from agent.base.tables import explanation
    from agent.checks.explain import UnknownCodeError, section

    try:
        explanation(console(), section(code))
    except UnknownCodeError as error:
        raise click.UsageError(str(error)) from None
