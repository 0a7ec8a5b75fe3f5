"""The interfaces probe in real network namespaces: roles, kinds, parents, and what NCCL would take.

A host's or a pod's namespace is made with ip(8), and the real probe runs inside it. Nothing is left behind: the
namespaces live and end with one process each. Needs root, unshare, nsenter and ip.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import cattrs
import pytest
from rigs.netns import missing
from rigs.tables import ROOT

from probes.interfaces import probe as interfaces
from probes.interfaces.facts import Interface, InterfacesFacts

SCRIPT, HOST, POD_DEVICES, POD = (
    Path(__file__).with_name(f"{name}.sh").read_text() for name in ("host_and_pod", "host", "pod_devices", "pod")
)

_LOOK = """
import json, cattrs
from probes.interfaces.read import read as read_interfaces
from probes.host.live import LiveHost
print("FACTS " + json.dumps(cattrs.unstructure(read_interfaces(LiveHost()))))
"""


def facts_of(host: str, pod: str = "") -> InterfacesFacts:
    """What the probe sees in the host's namespace after its script, or in the pod's after both."""
    usual = {k: v for k, v in os.environ.items() if k != "KUBERNETES_SERVICE_HOST"}
    scripts = {"HOST_SCRIPT": host, "POD_SCRIPT": pod, "PYTHON": sys.executable, "LOOK": _LOOK, "PYTHONPATH": str(ROOT)}
    command = ["unshare", "-n", "-m", "bash", "-c", SCRIPT]
    done = subprocess.run(
        command, env=usual | scripts, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    if done.returncode or not lines:
        raise RuntimeError(f"the namespace's script ended with {done.returncode}: {done.stderr[-2000:]}")
    return cattrs.structure(json.loads(lines[0].removeprefix("FACTS ")), InterfacesFacts)


pytestmark = [pytest.mark.netns, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def by_name(facts: InterfacesFacts) -> dict[str, Interface]:
    return {interface.name: interface for interface in facts.interfaces}


@pytest.mark.real
def test_a_host_with_every_kind() -> None:
    facts = facts_of(HOST)
    found = by_name(facts)
    kinds = {
        "lo": ("loopback", None), "wire": ("virtual", "veth"), "docker0": ("docker", "bridge"),
        "cni0": ("bridge", "bridge"), "flannel.1": ("virtual", "vxlan"), "peer0": ("virtual", "veth"),
    }  # fmt: skip
    assert {name: (found[name].role, found[name].kind) for name in kinds} == kinds
    others = (name for name in found if name not in kinds)
    assert all(name.startswith(("wireend", "peer1", "ifb", "dummy", "tunl")) for name in others)
    assert (found["flannel.1"].parent, found["wire"].parent) == ("wire", None)
    assert found["peer0"].master == "docker0"
    assert found["wire"].addresses[0] == "10.0.0.1/24"
    assert (found["wire"].mtu_bytes, found["wire"].running) == (9000, True)
    assert facts.nccl_choice == "wire"
    assert found["wire"].speed_bytes_per_second is None, "a veth's 10 Gb/s is a constant of its driver"


def test_what_stands_on_a_wire() -> None:
    """Macvlan everywhere; vlan and ipvlan where this kernel has them (the Soft-RoCE guest's kernel does)."""
    tops = {"macvlan": "mode bridge", "vlan": "id 7", "ipvlan": "mode l2"}
    lower = "".join(
        f"ip link add low{kind} type veth peer name end{kind}; ip link set low{kind} up; ip link set end{kind} up;"
        f"ip link add top{kind} link low{kind} type {kind} {options} && ip link set top{kind} up || true\n"
        for kind, options in tops.items()
    )
    found = by_name(facts_of(lower))
    assert "topmacvlan" in found
    for kind in (kind for kind in tops if f"top{kind}" in found):
        top = found[f"top{kind}"]
        assert (top.role, top.kind, top.parent, top.parent_elsewhere) == ("host", kind, f"low{kind}", False)


def test_a_pod_with_a_macvlan_beside_its_overlay() -> None:
    facts = facts_of(POD_DEVICES, POD)
    found = by_name(facts)
    assert (found["eth0"].role, found["net1"].role) == ("pod-default", "secondary")
    assert (found["net1"].kind, found["net1"].parent, found["net1"].parent_elsewhere) == ("macvlan", None, True)
    assert (facts.default_route, facts.nccl_choice) == ("eth0", "eth0")
    wrong = [f for f in interfaces.check(facts) if f.code == "interfaces.choice.wrong"]
    assert [f.subject for f in wrong] == ["eth0"]
    assert "NCCL_SOCKET_IFNAME=net1" in wrong[0].remedy
