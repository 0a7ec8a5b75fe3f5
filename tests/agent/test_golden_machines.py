"""The whole product on every recorded machine: findings, exposition, advice. `make golden` rewrites; read the diff."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agent.advice.advise import for_view
from agent.advice.request import Request
from agent.base.documents import document
from agent.checks.view import View, look
from agent.metrics import families as metrics
from probes.host.recording import load
from probes.scan import scan

FOLDER = Path(__file__).parent.parent / "machines"
MACHINES = sorted(FOLDER.glob("*.json"))
H100 = "hgx-h100-8xH100-8hca"
SOUND = {
    **{path.stem: H100 for path in MACHINES if path.stem.startswith("sick-h100")},
    "sick-l40s-x4": "l40s-4x-pcie",
    "r760xa-2xA40-bf3-memlock-8MiB": "r760xa-2xA40-bf3",
}
Golden = Callable[..., None]


@pytest.fixture(scope="module", params=MACHINES, ids=lambda path: path.stem)
def machine(request: pytest.FixtureRequest) -> tuple[str, View]:
    path: Path = request.param
    return path.stem, look((scan(load(path)),))


def test_golden_findings(machine: tuple[str, View], golden: Golden) -> None:
    """What the gate says, with evidence and remedy."""
    name, view = machine
    said = [c for c in document(view.checks) if c["status"] != "pass"]
    golden(f"{name}/findings.json", {"verdict": document(view.verdict), "checks": said})


def test_golden_exposition(machine: tuple[str, View], golden: Golden) -> None:
    """Every value of one scan; of a machine that was made from a sound one, what differs from that."""
    name, view = machine
    found = samples_of(view)
    if (sound := SOUND.get(name)) is not None:
        before = samples_of(view_of(sound))
        found = [f"- {line}" for line in before if line not in set(found)] + [
            f"+ {line}" for line in found if line not in set(before)
        ]
    golden(f"{name}/metrics.txt", "\n".join(found) + "\n")


def samples_of(view: View) -> list[str]:
    """The exposition without help and types, which tests/golden/surface.json has."""
    text = metrics.exposition(view, "")[0].decode()
    # durations and the agent's version differ from run to run
    text = re.sub(r"(topoflight_probe_duration_seconds\{.*\}) .*", r"\1 X", text)
    text = re.sub(r'topoflight_build_info\{version=".*"\}', "topoflight_build_info{...}", text)
    return [line for line in text.splitlines() if not line.startswith("#")]


@cache
def view_of(name: str) -> View:
    return look((scan(load(FOLDER / f"{name}.json")),))


def test_golden_advice(machine: tuple[str, View], golden: Golden) -> None:
    """Environment, and the layout for a full and a LoRA fine-tune of an 8B model; figures to two digits."""
    name, view = machine
    for method in ("lora", "full"):
        advice = for_view(view, Request.of(model="Llama-3.1-8B", method=method, global_batch=64))
        golden(f"{name}/advice-{method}.json", shortened(document(advice)), digest=True)


def shortened(value: Any) -> Any:
    """Numbers to three digits: a golden is about the advice, not the eleventh decimal."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    return [shortened(item) for item in value] if isinstance(value, list) else value


def one(pattern: str) -> View:
    (path,) = [p for p in MACHINES if re.fullmatch(pattern, p.stem)]
    return look((scan(load(path)),))


def settings(view: View, nodes: int = 2) -> dict[str, str]:
    """The environment for a job over several such nodes."""
    return {s.name: s.value for s in for_view(view, Request.of(nodes=nodes)).settings}


def test_efa_machine_gets_no_hca_list() -> None:
    """p4d: EFA devices are the plugin's, NCCL's IB transport never opens them."""
    found = settings(one("aws-p4d.*"))
    assert "NCCL_IB_HCA" not in found
    assert "NCCL_IB_GID_INDEX" not in found


def test_roce_pair_gets_its_secondary_interface_and_hca_by_name() -> None:
    """2xA40 with BlueField-3: net1, and the HCA behind it."""
    found = settings(one("r760xa-2xA40-bf3"))
    assert found["NCCL_SOCKET_IFNAME"] in ("net1", "=net1")
    assert "mlx5_1" in found["NCCL_IB_HCA"]


def test_nvswitch_box_is_told_to_set_nothing_for_what_nccl_finds() -> None:
    """8xH100, one node: no P2P level, no NVLS switch, no HCA list."""
    view = one("hgx-h100.*")
    advice = for_view(view, Request())
    names = {s.name for s in advice.settings}
    assert not names & {"NCCL_P2P_LEVEL", "NCCL_NVLS_ENABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_IB_HCA"}
    assert any("set nothing" in note.text.lower() for note in advice.notes)
