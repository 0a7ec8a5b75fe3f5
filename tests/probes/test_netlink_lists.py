"""Links, addresses and routes of this kernel, in a namespace with links of every kind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LINKS = Path(__file__).with_name("netlink_links.batch")
ASK = """
import json
from probes.host.live import LiveHost
host = LiveHost()
print(json.dumps({what: host.netlink(what) for what in ("links", "addresses", "routes")}))
"""


@pytest.mark.netns
def test_links_of_every_kind_as_recordings_hold_them(tmp_path: Path) -> None:
    """What a probe reads, under pyroute2's names, and nothing else: a recording must not grow by statistics."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs root, unshare and ip")
    (tmp_path / "ask.py").write_text(ASK)
    command = ["unshare", "-n", "sh", "-c", f"ip -force -batch {LINKS}; {sys.executable} {tmp_path}/ask.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    links = {link["IFLA_IFNAME"]: link for link in found["links"]}
    index = {name: link["index"] for name, link in links.items()}
    assert links["v0"].keys() == {
        "index", "flags", "IFLA_IFNAME", "IFLA_MTU", "IFLA_LINKINFO", "IFLA_LINK",
    }  # fmt: skip
    assert links["v0"]["IFLA_MTU"] == 9000
    assert links["v0"]["flags"] & 0x41 == 0x41, "up and running"
    kinds = {name: link["IFLA_LINKINFO"] for name, link in links.items() if name in ("br0", "v0", "v0.7", "mv0", "vx0")}
    standing = {"v0.7": "vlan", "mv0": "macvlan", "br0": "bridge", "v0": "veth"}
    assert {name: kinds[name] for name in kinds if name != "vx0"} == {
        name: {"IFLA_INFO_KIND": kind} for name, kind in standing.items() if name in kinds
    }
    assert "v0" in kinds
    if "vx0" in kinds:
        assert kinds["vx0"] == {"IFLA_INFO_KIND": "vxlan", "IFLA_INFO_DATA": {"IFLA_VXLAN_LINK": index["v0"]}}
    for name in {"v0.7", "mv0"} & links.keys():
        assert links[name]["IFLA_LINK"] == index["v0"]
    if "br0" in links:
        assert links["v1"]["IFLA_MASTER"] == index["br0"]
    mine = {a["IFA_ADDRESS"]: a for a in found["addresses"] if a["index"] == index["v0"]}
    assert {"10.1.2.3", "fd00::3"} <= mine.keys()
    assert mine["10.1.2.3"] == {
        "prefixlen": 24, "index": index["v0"], "IFA_ADDRESS": "10.1.2.3", "IFA_LOCAL": "10.1.2.3",
    }  # fmt: skip
    routes = {(r.get("RTA_DST"), r["dst_len"]): r for r in found["routes"] if r["family"] == 2}
    default = routes[None, 0]
    assert (default["RTA_PRIORITY"], default["RTA_OIF"]) == (50, index["v0"])
    assert routes["10.8.0.0", 16]["RTA_TABLE"] == 1234
    if ("10.9.0.0", 16) in routes:  # not every kernel is built with routes of several ways
        assert routes["10.9.0.0", 16]["RTA_MULTIPATH"] == [{"oif": index["v0"]}, {"oif": index["v0"]}]
