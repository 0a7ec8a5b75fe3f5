"""The surface that users build on, frozen: codes, metrics, verbs, options, variables, endpoints.

A difference here is a change that a user notices: `TOPOFLIGHT_UPDATE_GOLDEN=1 pytest tests/agent/test_surface.py`
rewrites the list, and CHANGELOG.md says what changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import click

from agent import metrics
from agent.base.options import _rows
from agent.checks.codes import ALL_CODES
from agent.cli.main import VERBS, cli
from agent.http.server import create
from agent.http.state import State
from collectives.nccl_log.codes import CODES as LOG_CODES
from planner.lint.tables import CODES as ENV_CODES

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("probes", "topology", "collectives", "planner", "finetune", "agent")


# Where a process's own variables come from, and by what a name is asked of them.
ASKED = re.compile(r"""(?:os\.environ|host\.environment\(\)|\bgetenv)(?:\.get|\.pop)?[(\[]\s*"([^"]+)\"""")


def codes() -> dict[str, list[str]]:
    return {"gate": sorted(ALL_CODES), "environment": sorted(ENV_CODES), "log": sorted(LOG_CODES)}


def metric_names() -> dict[str, list[str]]:
    return {family.exposed: list(family.labels) for family in metrics.CATALOGUE}


def options(command: click.Command) -> list[str]:
    found: list[str] = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            found.append(f"{(parameter.name or '').upper()}")
        else:
            found.extend((*parameter.opts, *parameter.secondary_opts))
    return sorted(found)


@cache
def commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    return {verb: command for verb in VERBS if (command := cli.get_command(context, verb)) is not None}


def verbs() -> dict[str, list[str]]:
    return {verb: options(command) for verb, command in commands().items()}


def endpoints() -> list[str]:
    app = create(State(tuple, interval_seconds=3600))
    found = {f"{method} {route.path}" for route in app.routes for method in getattr(route, "methods", None) or ()}
    assert {f"{method.upper()} {path}" for path, item in app.openapi()["paths"].items() for method in item} <= found
    return sorted(endpoint for endpoint in found if not endpoint.startswith("HEAD "))


@cache
def variables() -> list[str]:
    """Names that product code asks an environment for, or an option."""
    options = (parameter for command in commands().values() for parameter in command.params)
    found = {str(option.envvar) for option in options if option.envvar}
    sources = [path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(found.union(*(ASKED.findall(source) for source in sources)))


def test_every_option_has_a_help_text() -> None:
    """A row of agent/base/verbs without one, or an empty row that shares nothing, is a gap on the man page."""
    found = [(verb, option) for verb, command in commands().items() for option in command.params]
    silent = [f"{verb} {one.opts}" for verb, one in found if isinstance(one, click.Option) and not one.help]
    assert not silent


def test_surface_is_frozen(golden: Callable[[str, Any], None]) -> None:
    """No code, metric, verb, option, variable or endpoint comes, goes or is renamed unseen."""
    assert set(verbs()) == set(VERBS)
    golden(
        "surface.json",
        {
            "finding_codes": codes(),
            "metrics": metric_names(),
            "verbs": verbs(),
            "environment_variables": variables(),
            "endpoints": endpoints(),
        },
    )


def test_what_an_option_requires_and_excludes_exists() -> None:
    """An option that requires one which its verb lacks could never be used; a name that no verb has is misspelt."""
    every = {name for names in verbs().values() for name in names}
    wrong = []
    for verb in {path.stem for path in (ROOT / "agent/base/verbs").glob("*.toml")} & set(verbs()):
        for option, row in _rows(verb).items():
            wrong += [f"{verb} {option}: {name}" for name in row.get("requires", ()) if name not in verbs()[verb]]
            wrong += [f"{verb} {option}: {name}" for name in row.get("excludes", ()) if name not in every]
    assert wrong == []
