"""DeviceClasses by what their selectors ask for: custom names, other devices of a driver, what is not understood."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from api_server import ApiServer, configuration, write_kubeconfig

from agent.cli.launch import launch
from agent.cluster.client import Client
from agent.cluster.dra_classes import GPU, NIC, CannotError, UnknownError, find, read

ROOT = Path(__file__).parent.parent.parent
V1 = "resource.k8s.io/v1"
API = f"/apis/{V1}"
PCIE = "resource.kubernetes.io/pcieRoot"
WHOLE = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"
MIG = WHOLE.replace("'gpu'", "'mig'")
DRANET = 'device.driver == "dra.net"'
RDMA = 'device.attributes["dra.net"].rdma == true'
# As a managed cluster names its RDMA interfaces: one expression, over several lines.
GUARDED = (
    "device.driver == \"dra.net\" && has(device.attributes['dra.net'].rdma)\n  && device.attributes['dra.net'].rdma"
)


def class_of(name: str, *expressions: str, **more: Any) -> dict[str, Any]:
    selectors = [{"cel": {"expression": expression}} for expression in expressions]
    return {"metadata": {"name": name}, "spec": {"selectors": selectors, **more}}


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


def found(api: ApiServer, usual: Any, *documents: dict[str, Any]) -> str:
    for document in documents:
        api.put(f"{API}/deviceclasses", "", document)
    return find(Client(configuration(api.url), tries=1), V1, usual).name


@pytest.mark.parametrize(
    ("attributes", "fitting"),
    [
        ({"type": {"string": "gpu"}}, {"whole"}), ({"type": {"string": "mig"}}, {"mig"}),
        ({"gpu.nvidia.com/type": {"string": "gpu"}}, {"whole"}), ({"type": {"version": "1.0.0"}}, set()), ({}, set()),
        ({"dra.net/rdma": {"bool": True}}, {"rdma", "guarded"}), ({"dra.net/rdma": {"bool": False}}, set()),
        ({"dra.net/rdma": {"string": "true"}}, set()),
    ],
)  # fmt: skip
def test_a_device_fits_what_has_every_attribute(attributes: dict[str, Any], fitting: set[str]) -> None:
    """A name without a domain is of the driver's own (Kubernetes API reference, Device)."""
    classes = {"whole": (WHOLE,), "mig": (MIG,), "rdma": (DRANET, RDMA), "guarded": (GUARDED,)}
    made = {name: read(class_of(name, *expressions)) for name, expressions in classes.items()}
    assert {name for name, one in made.items() if one.fits({"attributes": attributes})} == fitting


@pytest.mark.parametrize(
    "expression",
    [
        "", "true", f"!({WHOLE})", f"{WHOLE} || true", "device.driver != 'gpu.nvidia.com'",
        "device.driver.startsWith('gpu.')", f"{WHOLE} && device.capacity['gpu.nvidia.com'].memory > quantity('40Gi')",
        f"{WHOLE} && device.attributes['gpu.nvidia.com'].productName.contains('H100')", f"{WHOLE} && {DRANET}",
        "device.attributes['gpu.nvidia.com'].type == 'gpu'",
    ],
)  # fmt: skip
def test_another_selector_is_unknown(api: ApiServer, expression: str) -> None:
    """Under the usual name too: what the class stands for is not guessed."""
    with pytest.raises(UnknownError, match=r"DeviceClass gpu\.nvidia\.com"):
        found(api, GPU, class_of("gpu.nvidia.com", expression))


def test_the_usual_name_comes_first_and_lists_nothing(api: ApiServer) -> None:
    """`get` is enough where the class has it."""
    assert found(api, GPU, class_of("gpu.nvidia.com", WHOLE), class_of("a", WHOLE)) == "gpu.nvidia.com"
    assert [path for _, path in api.requests] == [f"{API}/deviceclasses/gpu.nvidia.com"]


def test_a_custom_class_is_found_by_its_driver(api: ApiServer) -> None:
    """Slices of GPUs, NICs without RDMA and other drivers' devices are others; configured classes are for others."""
    classes = [
        class_of("mig", MIG), class_of("passed-through", WHOLE, config=[{"opaque": {"driver": "gpu.nvidia.com"}}]),
        class_of("large", f"{WHOLE} && device.capacity['gpu.nvidia.com'].memory > quantity('40Gi')"),
        class_of("team-gpu", WHOLE), class_of("plain-nic", DRANET), class_of("rdma-nic", DRANET, RDMA),
        class_of("no-rdma", DRANET, RDMA.replace("true", "false")), class_of("fpga", "device.driver == 'fpga.example'"),
    ]  # fmt: skip
    assert (found(api, GPU, *classes), found(api, NIC)) == ("team-gpu", "rdma-nic")


def test_of_several_that_ask_for_different_things_none_is_taken(api: ApiServer) -> None:
    """Two that ask for the same are one."""
    named = [f"{WHOLE} && device.attributes['gpu.nvidia.com'].productName == '{name}'" for name in ("A", "B")]
    with pytest.raises(CannotError, match=r"several others of driver gpu\.nvidia\.com: a, b$"):
        found(api, GPU, class_of("a", named[0]), class_of("b", named[1]))
    assert found(api, GPU, class_of("d", WHOLE), class_of("c", WHOLE)) == "c"


def test_none_is_told_from_one_that_is_not_understood(api: ApiServer) -> None:
    """A class of another driver does not make it unknown."""
    with pytest.raises(CannotError, match=r"there is no DeviceClass dranet\.net, and no other of driver dra\.net$"):
        found(api, NIC, class_of("other", "device.driver.startsWith('fpga')"))
    with pytest.raises(UnknownError, match="DeviceClass odd are not understood"):
        found(api, NIC, class_of("odd", "device.driver in ['dra.net']"))


@pytest.mark.parametrize("words", [(), ("--dra",)])
def test_the_claim_names_the_cluster_s_own_classes(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Asked for by --dra or found: the same claim."""
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "config", api.url)))
    api.put(f"{API}/deviceclasses", "", class_of("team-gpu", WHOLE))
    api.put(f"{API}/deviceclasses", "", class_of("rdma-nic", DRANET, RDMA))
    for driver, told in (
        ("gpu.nvidia.com", {"type": {"string": "gpu"}}),
        ("dra.net", {"dra.net/rdma": {"bool": True}}),
    ):
        devices = [{"name": f"d{i}", "attributes": {PCIE: {"string": f"pci{i}"}, **told}} for i in range(8)]
        spec = {"driver": driver, "nodeName": "a", "devices": devices, "pool": {"name": driver, "generation": 1}}
        api.put(f"{API}/resourceslices", "", {"metadata": {"name": driver}, "spec": spec})
    done = CliRunner().invoke(
        launch,
        ["--host", str(ROOT / "tests/machines/hgx-h100-8xH100-8hca.json"), "--model", "Llama-3.1-8B",
         "--image", "r/f:1", "--set", "dataset_name=openai/gsm8k", "--set", "output_dir=/mnt/local", "--api", "job",
         "--no-preflight", "--dry-run", "-o", "json", *words],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "DRA: used: 1 node with 8 GPUs each with a NIC under its PCIe root" in done.stderr
    (template,) = (one for one in json.loads(done.stdout)["items"] if one["kind"] == "ResourceClaimTemplate")
    requests = template["spec"]["spec"]["devices"]["requests"]
    assert {request["exactly"]["deviceClassName"] for request in requests} == {"team-gpu", "rdma-nic"}
