"""The machine: CPU, NUMA, hypervisor, the container around us, and the files NCCL takes settings from."""

from __future__ import annotations

from pathlib import Path

import yaml
from dicthost import DictHost
from rigs.tables import each_row

from probes.hostinfo import probe as hostinfo
from probes.hostinfo.read import container, nccl_conf, of_agent
from probes.hostinfo.read import read as read_hostinfo

XEON = Path(__file__).with_name("cpuinfo_xeon.txt").read_text(encoding="utf-8")
GRACE = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
POWER = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\n"
DMI = "/sys/class/dmi/id/"
ID = "5de52e359e15c1016d1777924320aef87fc439d8be297303af47b7d2f1e82164"
POD = "0e4d2c1a-5f6b-4a3e-9d8c-7b6a5f4e3d2c"
TEXT = Path(__file__).with_name("container_kinds.yaml").read_text(encoding="utf-8")
ROWS = yaml.safe_load(TEXT.replace("{ID}", ID).replace("{POD}", POD))


def test_cpu_and_sockets() -> None:
    facts = read_hostinfo(DictHost({"/proc/cpuinfo": XEON.format(flag="sse2")}, cpu={"logical": 2, "physical": 2}))
    assert (facts.cpu_vendor, facts.cpu_family, facts.cpu_model, facts.sockets) == ("GenuineIntel", 6, 143, 2)
    assert facts.virtual_machine is None
    assert (facts.threads, facts.memory_bytes) == (2, None)
    vendors = {text: read_hostinfo(DictHost({"/proc/cpuinfo": text})).cpu_vendor for text in (GRACE, POWER, "")}
    assert vendors == {GRACE: "ARM", POWER: "IBM", "": None}


@each_row(("grace", "flag", "vendor", "product", "name"), ROWS["hypervisors"])
def test_hypervisor(grace: bool, flag: str, vendor: str, product: str, name: str | None) -> None:
    cpuinfo = GRACE if grace else XEON.format(flag=flag)
    files = {"/proc/cpuinfo": cpuinfo, DMI + "sys_vendor": vendor + "\n", DMI + "product_name": product + "\n"}
    assert read_hostinfo(DictHost(files)).virtual_machine == name


def test_numa_nodes_may_have_gaps_and_no_memory() -> None:
    nodes = "/sys/devices/system/node/"
    host = DictHost(
        {
            nodes + "node0/cpulist": "0-79\n",
            nodes + "node0/meminfo": "Node 0 MemTotal:       267000000 kB\nNode 0 MemFree: 1 kB\n",
            nodes + "node0/distance": "10 40\n",
            nodes + "node8/cpulist": "80-159\n",
            nodes + "node8/meminfo": "Node 8 MemTotal:       0 kB\n",
            nodes + "node8/distance": "40 10\n",
            nodes + "possible": "0-255\n",
            "/proc/sys/kernel/numa_balancing": "1\n",
        }
    )
    facts = read_hostinfo(host)
    assert [(n.node, n.cpus, n.memory_bytes, n.distances) for n in facts.numa] == [
        (0, "0-79", 267000000 * 1024, (10, 40)),
        (8, "80-159", 0, (40, 10)),
    ]
    assert {(f.code, f.subject) for f in hostinfo.check(facts)} == {
        ("hostinfo.numa.memoryless", "NUMA8"),
        ("hostinfo.numa.balancing", ""),
    }
    exported = {s.labels: s.value for s in hostinfo.samples(facts)}
    assert exported["0", "8"] == 4.0


def test_a_node_of_gpu_memory_is_no_fault_and_a_busy_host_is_told_before_it_is_measured() -> None:
    node = hostinfo.NumaNode(node=1, cpus="", memory_bytes=0)
    assert not list(hostinfo.check(hostinfo.HostinfoFacts(hostname="h", numa=(node,))))
    busy = hostinfo.HostinfoFacts(hostname="h", load=9.0, threads=8)
    assert [f.code for f in hostinfo.check(busy)] == ["hostinfo.load.high"]


def test_nccl_conf_of_the_user_wins_over_that_of_the_machine() -> None:
    files = {
        "/root/.nccl.conf": "NCCL_DEBUG=INFO\n# NCCL_ALGO=Ring\n",
        "/etc/nccl.conf": "NCCL_DEBUG=WARN\nNCCL_TOPO_FILE=/opt/microsoft/ndv4-topo.xml\n",
    }
    conf, sources = nccl_conf(DictHost(files), "/root")
    assert conf == {"NCCL_DEBUG": "INFO", "NCCL_TOPO_FILE": "/opt/microsoft/ndv4-topo.xml"}
    assert sources == ("/root/.nccl.conf", "/etc/nccl.conf")
    assert nccl_conf(DictHost(), "/root") == (None, ())


def test_platform_is_told_by_files_on_the_disk() -> None:
    """DMI's asset tag, cloud-init's file, and what the vendor's installer left."""
    script = "/usr/local/gib/scripts/set_nccl_env.sh"
    files = {
        "/sys/class/dmi/id/chassis_asset_tag": "OracleCloud.com\n",
        "/run/cloud-init/cloud-id": "oracle\n",
        script: "export NCCL_NET=gIB\n",
    }
    facts = read_hostinfo(DictHost(files))
    assert (facts.chassis_asset_tag, facts.cloud_id, facts.vendor_files) == ("OracleCloud.com", "oracle", (script,))
    bare = read_hostinfo(DictHost())
    assert (bare.chassis_asset_tag, bare.cloud_id, bare.vendor_files, bare.storage_servers) == (None, None, (), ())


def test_addresses_of_file_servers_come_from_the_mounts() -> None:
    """NFS, Lustre with several servers; no local file system, nothing that only looks like an address."""
    mounts = (
        "/dev/sda2 / ext4 rw 0 0\n"
        "10.200.7.9:/data /data nfs4 rw,addr=10.200.7.9 0 0\n"
        "10.3.0.1@o2ib:10.3.0.2@o2ib:/scratch /scratch lustre rw 0 0\n"
        "999.1.1.1:/x /x nfs rw 0 0\n"
        "tmpfs /run tmpfs rw 0 0\n"
    )
    facts = read_hostinfo(DictHost({"/proc/self/mounts": mounts}))
    assert facts.storage_servers == ("10.200.7.9", "10.3.0.1", "10.3.0.2")


@each_row(("kind", "files", "environment"), ROWS["kinds"])
def test_container_is_known_by_its_engines_traces(
    kind: str | None, files: dict[str, str], environment: dict[str, str]
) -> None:
    """One trace is enough; a pod's stands above its engine's."""
    assert container(DictHost(dict(files), environment=environment)) == kind


def test_the_agents_container_is_one_that_says_so() -> None:
    """On a host without container `serve` shares what jobs get: its limits are judged."""
    role = {hostinfo.ROLE: "agent"}
    assert of_agent(DictHost({"/.dockerenv": ""}, environment=role))
    assert not of_agent(DictHost({"/.dockerenv": ""}))
    assert not of_agent(DictHost({}, environment=role))
