"""Our reading of rtnetlink beside pyroute2's, on links of every kind that matters, in a network namespace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LINKS = """
link add br0 type bridge
link add v0 type veth peer name v1
link set v1 master br0
link add link v0 name v0.7 type vlan id 7
link add mv0 link v0 type macvlan
link add vx0 type vxlan id 9 dev v0 dstport 4789
link set lo up
link set br0 up
link set v0 up mtu 9000
link set v1 up
addr add 10.1.2.3/24 dev v0
addr add fd00::3/64 dev v0
route add default via 10.1.2.1 metric 50
route add 10.9.0.0/16 nexthop via 10.1.2.7 weight 1 nexthop via 10.1.2.8 weight 2
route add 10.8.0.0/16 via 10.1.2.9 table 1234
"""
COMPARE = """
import json, time, pyroute2
from probes.host.live import LiveHost
def both(what, ask):
    end = time.monotonic() + 60
    while True:  # the kernel goes on with carriers and duplicate addresses: both must have read the same moment
        ours, whole = host.netlink(what), [plain(m) for m in ask()]
        if host.netlink(what) == ours or time.monotonic() > end:
            return ours, whole
def plain(value):
    if isinstance(value, dict):
        flat = {k: plain(v) for k, v in value.items() if k != "attrs"}
        return {**{name: plain(v) for name, v in value.get("attrs", ())}, **flat}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value
host, theirs, wrong, count = LiveHost("/"), pyroute2.IPRoute(), [], {}
for what, ask in (("links", theirs.get_links), ("addresses", theirs.get_addr), ("routes", theirs.get_routes)):
    ours, whole = both(what, ask)
    count[what] = [len(ours), len(whole)]
    for mine, other in zip(ours, whole):
        for key, value in mine.items():
            reference = other.get(key)
            if isinstance(value, dict):
                reference = {k: reference.get(k) for k in value}
                if "IFLA_INFO_DATA" in value:
                    reference["IFLA_INFO_DATA"] = {k: reference["IFLA_INFO_DATA"][k] for k in value["IFLA_INFO_DATA"]}
            if isinstance(value, list):
                reference = [{k: hop.get(k) for k in mine_hop} for hop, mine_hop in zip(reference, value)]
            if value != reference:
                wrong.append([what, key, value, str(reference)])
kinds = [m.get("IFLA_LINKINFO", {}).get("IFLA_INFO_KIND") for m in host.netlink("links")]
print(json.dumps({"wrong": wrong, "count": count, "kinds": kinds, "routes": host.netlink("routes")}))
"""


@pytest.mark.netns
def test_the_same_as_pyroute2(tmp_path: Path) -> None:
    """Field by field; a field that only pyroute2 names is one that no probe reads."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs root, unshare and ip")
    (tmp_path / "links").write_text(LINKS.strip() + "\n")
    (tmp_path / "compare.py").write_text(COMPARE)
    made = subprocess.run(
        ["unshare", "-n", "sh", "-c", f"ip -force -batch {tmp_path}/links; {sys.executable} {tmp_path}/compare.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert found["wrong"] == []
    assert all(ours == theirs for ours, theirs in found["count"].values()), found["count"]
    assert "veth" in found["kinds"], f"the namespace has only {found['kinds']}: {made.stderr}"
    assert any(route.get("RTA_PRIORITY") == 50 for route in found["routes"])
