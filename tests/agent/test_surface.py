"""Frozen outputs: the surface that users build on, and the whole product on every recorded machine.

The surface is codes, metrics, verbs, options, variables, endpoints. A difference there is a change that a user notices:
`TOPOFLIGHT_UPDATE_GOLDEN=1 pytest tests/agent/test_surface.py` rewrites it, and CHANGELOG.md says what changed. `make
golden` rewrites findings, exposition and advice; read the difference.
"""

import json
import re
from collections.abc import Callable
from functools import cache

import click
from rigs.recorded import H100, NAMES, view
from rigs.tables import ROOT, each_row

from agent import metrics
from agent.advice.advise import Request, advise_view
from agent.base.options import _rows
from agent.base.output import to_document
from agent.checks.measured import ALL_CODES
from agent.cli.main import VERBS, cli
from agent.http.server import create
from agent.http.state import State
from collectives.nccl_log.codes import CODES as LOG_CODES
from planner.lint.findings import CODES as ENV_CODES

PACKAGES = ("probes", "topology", "collectives", "planner", "finetune", "agent")


# Where a process's own variables come from, and by what a name is asked of them.
ASKED = re.compile(r"""(?:os\.environ|host\.environment\(\)|\bgetenv)(?:\.get|\.pop)?[(\[]\s*"([^"]+)\"""")


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


def test_surface_is_frozen(golden) -> None:
    """No code, metric, verb, option, variable or endpoint comes, goes or is renamed unseen."""
    assert set(verbs()) == set(VERBS)
    golden(
        "surface.json",
        {
            "finding_codes": {"gate": sorted(ALL_CODES), "environment": sorted(ENV_CODES), "log": sorted(LOG_CODES)},
            "metrics": {family.exposed: list(family.labels) for family in metrics.CATALOGUE},
            "verbs": verbs(),
            "environment_variables": variables(),
            "endpoints": endpoints(),
        },
    )


def test_what_an_option_requires_and_excludes_exists() -> None:
    """An option that requires one which its verb lacks could never be used; a name that no verb has is misspelt."""
    every = {name for names in verbs().values() for name in names}
    wrong = []

    def own(name: str) -> str:
        return name.partition("=")[0]  # "--api=slurm": with this value alone

    for verb in {path.stem for path in (ROOT / "agent/base/verbs").glob("*.toml")} & set(verbs()):
        for option, row in _rows(verb).items():
            wrong += [f"{verb} {option}: {name}" for name in row.get("requires", ()) if own(name) not in verbs()[verb]]
            wrong += [f"{verb} {option}: {name}" for name in row.get("excludes", ()) if own(name) not in every]
    assert wrong == []


SOUND = {
    **{name: H100 for name in NAMES if name.startswith("sick-h100")},
    "sick-l40s-x4": "l40s-4x-pcie",
    "r760xa-2xA40-bf3-memlock-8MiB": "r760xa-2xA40-bf3",
}
Golden = Callable[..., None]


@each_row("name", NAMES)
def test_golden_findings(name: str, golden: Golden) -> None:
    """What the gate says, with evidence and remedy; findings that differ only in code and subject are one row."""
    found: dict = {}
    for check in to_document(view(name).checks):
        code = f"{check.pop('code')} {check.pop('subject')}".strip()
        if check["status"] != "pass":
            found.setdefault(json.dumps(check), {"codes": [], **check})["codes"].append(code)
    golden(f"{name}/findings.json", {"verdict": to_document(view(name).verdict), "checks": list(found.values())})


@each_row("name", NAMES)
def test_golden_exposition(name: str, golden: Golden) -> None:
    """Every value of one scan; of a machine that was made from a sound one, what differs from that."""
    found = samples_of(name)
    if (sound := SOUND.get(name)) is not None:
        before = samples_of(sound)
        found = [f"- {line}" for line in before if line not in set(found)] + [
            f"+ {line}" for line in found if line not in set(before)
        ]
    golden(f"{name}/metrics.txt", "\n".join(found) + "\n")


def samples_of(name: str) -> list[str]:
    """The exposition without help and types, which tests/golden/surface.json has."""
    text = metrics.expose(view(name), "")[0].decode()
    # durations and the agent's version differ from run to run
    text = re.sub(r"(topoflight_probe_duration_seconds\{.*\}) .*", r"\1 X", text)
    text = re.sub(r'topoflight_build_info\{version=".*"\}', "topoflight_build_info{...}", text)
    return [line for line in text.splitlines() if not line.startswith("#")]


@each_row("name", NAMES)
def test_golden_advice(name: str, golden: Golden) -> None:
    """Environment, and the layout for a full and a LoRA fine-tune of an 8B model; figures to two digits."""
    for method in ("lora", "full"):
        advice = advise_view(view(name), Request.of(model="Llama-3.1-8B", method=method, global_batch=64))
        golden(f"{name}/advice-{method}.json", shortened(to_document(advice)), digest=True)


def shortened(value):
    """Numbers to three digits: a golden is about the advice, not the eleventh decimal."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    return [shortened(item) for item in value] if isinstance(value, list) else value
