"""The whole product on every recorded machine: findings, exposition, advice. `make golden` rewrites; read the diff."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rigs.recorded import H100, NAMES, view
from rigs.tables import each_row

from agent import metrics
from agent.advice.advise import for_view
from agent.advice.request import Request
from agent.base.documents import document

SOUND = {
    **{name: H100 for name in NAMES if name.startswith("sick-h100")},
    "sick-l40s-x4": "l40s-4x-pcie",
    "r760xa-2xA40-bf3-memlock-8MiB": "r760xa-2xA40-bf3",
}
Golden = Callable[..., None]


@each_row("name", NAMES)
def test_golden_findings(name: str, golden: Golden) -> None:
    """What the gate says, with evidence and remedy."""
    said = [c for c in document(view(name).checks) if c["status"] != "pass"]
    golden(f"{name}/findings.json", {"verdict": document(view(name).verdict), "checks": said})


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
    text = metrics.exposition(view(name), "")[0].decode()
    # durations and the agent's version differ from run to run
    text = re.sub(r"(topoflight_probe_duration_seconds\{.*\}) .*", r"\1 X", text)
    text = re.sub(r'topoflight_build_info\{version=".*"\}', "topoflight_build_info{...}", text)
    return [line for line in text.splitlines() if not line.startswith("#")]


@each_row("name", NAMES)
def test_golden_advice(name: str, golden: Golden) -> None:
    """Environment, and the layout for a full and a LoRA fine-tune of an 8B model; figures to two digits."""
    for method in ("lora", "full"):
        advice = for_view(view(name), Request.of(model="Llama-3.1-8B", method=method, global_batch=64))
        golden(f"{name}/advice-{method}.json", shortened(document(advice)), digest=True)


def shortened(value: Any) -> Any:
    """Numbers to three digits: a golden is about the advice, not the eleventh decimal."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    return [shortened(item) for item in value] if isinstance(value, list) else value
