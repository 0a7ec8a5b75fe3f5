"""MIG slices as NVML lists them, through the fake driver library: who they are, and what an unread one leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rigs.found import findings

from contracts.finding import Status
from probes.gpu.facts import GpuFacts, MigSlice
from probes.scanner import Scanner

H100, NAME = "hgx-h100-8xH100-8hca", "NVIDIA H100 80GB HBM3"
ON = {"nvmlDeviceGetMigMode": {"gpu2": [1, 1]}, "nvmlDeviceGetMaxMigDeviceCount": {"gpu2": 7}}


def place(uuid: str, name: str, gpu_instance: int, compute_instance: int = 0) -> dict[str, Any]:
    return {"uuid": uuid, "name": name, "gpuInstance": gpu_instance, "computeInstance": compute_instance}


def slices(*told: Any) -> dict[str, dict[str, Any]]:
    """NVML of a GPU2 with MIG on: at each place a slice, or the name of an error."""
    every = [*told, *["NOT_FOUND"] * (7 - len(told))]
    answers = {f"gpu2,{i}": {"$nvml": one} if isinstance(one, str) else one for i, one in enumerate(every)}
    return {**ON, "nvmlDeviceGetMigDeviceHandleByIndex": answers}


THREE = (place("MIG-a", f"{NAME} MIG 3g.40gb", 1), "NOT_FOUND", place("MIG-b", f"{NAME} MIG 1c.3g.40gb", 2, 1),
         place("MIG-c", f"{NAME} MIG 1g.10gb+me", 9))  # fmt: skip


def test_each_slice_is_listed_and_an_empty_place_is_none(scanner_of: Callable[..., Scanner]) -> None:
    with scanner_of(H100, nvml=slices(*THREE)) as scanner:
        snapshot = scanner.scan()
    facts = snapshot.facts(GpuFacts)
    assert facts.gpus[2].mig_slices == (
        MigSlice(uuid="MIG-a", profile="3g.40gb", gpu_instance=1, compute_instance=0),
        MigSlice(uuid="MIG-b", profile="1c.3g.40gb", gpu_instance=2, compute_instance=1),
        MigSlice(uuid="MIG-c", profile="1g.10gb+me", gpu_instance=9, compute_instance=0),
    )
    assert {gpu.mig_slices for gpu in facts.gpus if gpu.index != 2} == {()}, "MIG is off there: none"
    assert facts.gpus[2].unread == () and facts.gpus[2].name == NAME, "a slice's name is not its GPU's"
    (found,) = [each for each in findings(snapshot) if each.code == "gpu.mig.enabled"]
    assert "1 of 3g.40gb, 1 of 1c.3g.40gb, 1 of 1g.10gb+me" in found.message
    assert "MIG-b 1c.3g.40gb (GPU instance 2, compute instance 1)" in found.evidence[0]


@pytest.mark.parametrize("error", ["NO_PERMISSION", "TIMEOUT", "UNKNOWN"])
def test_a_slice_that_is_not_read_leaves_all_unknown(error: str, scanner_of: Callable[..., Scanner]) -> None:
    with scanner_of(H100, nvml=slices(THREE[0], error)) as scanner:
        snapshot = scanner.scan()
    facts = snapshot.facts(GpuFacts)
    assert facts is not None and facts.gpus[2].mig_slices is None
    assert facts.gpus[2].unread == (f"nvmlDeviceGetMigDeviceHandleByIndex(1) = {error}",)
    told = {(each.code, each.status): each.message for each in findings(snapshot) if each.subject == "GPU2"}
    assert "its slices were not read" in told["gpu.mig.enabled", Status.FAIL]
    assert ("gpu.device.unread", Status.UNKNOWN) in told


@pytest.mark.parametrize(("most", "found"), [(0, ()), (65, None), (4_000_000_000, None)])
def test_how_many_are_asked_for_is_bounded(most: int, found: Any, scanner_of: Callable[..., Scanner]) -> None:
    with scanner_of(H100, nvml={**ON, "nvmlDeviceGetMaxMigDeviceCount": {"gpu2": most}}) as scanner:
        facts = scanner.scan().facts(GpuFacts)
    assert facts is not None and facts.gpus[2].mig_slices == found and facts.gpus[2].error is None


def test_a_driver_that_knows_no_slices_leaves_them_unknown(scanner_of: Callable[..., Scanner]) -> None:
    with scanner_of(H100, nvml={"nvmlDeviceGetMigMode": {"gpu2": [1, 1]}}) as scanner:
        facts = scanner.scan().facts(GpuFacts)
    assert facts is not None and facts.gpus[2].mig_enabled and facts.gpus[2].mig_slices is None
