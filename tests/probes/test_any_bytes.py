"""Any bytes in any file, and any error in its place, never crash a probe: they become unknown."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from dicthost import Content, DictHost
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.api import Probe, UnavailableError
from probes.hostinfo import probe as hostinfo
from probes.interfaces import probe as interfaces
from probes.limits import probe as limits
from probes.pci import probe as pci
from probes.rdma import probe as rdma
from probes.worker import reader

GPU, NIC = "/sys/devices/pci0000:10/0000:10:01.0/0000:18:00.0", "/sys/devices/pci0000:10/0000:10:02.0/0000:19:00.0"
PORT = f"{NIC}/infiniband/mlx5_0/ports/1"
FILES = (
    *(f"/proc/{name}" for name in (
        "cpuinfo", "meminfo", "cmdline", "self/status", "self/cgroup", "1/cgroup", "net/route",
        "driver/nvidia/version", "sys/kernel/numa_balancing")),
    *(f"/etc/{name}" for name in (
        "hosts", "os-release", "nccl.conf", "podinfo/network-status", "podnetinfo/annotations")),
    *(f"/sys/class/dmi/id/{name}" for name in ("sys_vendor", "product_name")),
    *(f"/sys/devices/system/node/node0/{name}" for name in ("cpulist", "meminfo", "distance")),
    *(f"/sys/fs/cgroup/{name}" for name in ("memory.max", "cpu.max")),
    "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
    "/sys/kernel/iommu_groups/7/type",
    *(f"{device}/{name}" for device in (GPU, NIC) for name in (
        "class", "vendor", "device", "numa_node", "current_link_speed", "max_link_speed", "current_link_width",
        "max_link_width", "config", "sriov_numvfs")),
    *(f"{PORT}/{name}" for name in ("state", "phys_state", "rate", "link_layer", "gids/0", "gid_attrs/types/0")),
    *(f"{PORT}/{name}" for name in ("gid_attrs/ndevs/0", "counters/link_downed", "hw_counters/lifespan")),
    *(f"{NIC}/infiniband/mlx5_0/{name}" for name in ("hca_type", "fw_ver", "node_desc")),
    f"{NIC}/infiniband_verbs/uverbs0/ibdev",
    *(f"{NIC}/net/eth0/{name}" for name in ("operstate", "mtu", "speed")),
)  # fmt: skip
SOUND: dict[str, Content] = {
    **dict.fromkeys(FILES, "1\n"),
    "/sys/bus/pci/drivers_autoprobe": "1\n",  # sysfs is mounted, whatever the bus holds
    f"{GPU}/class": "0x030200\n",
    f"{NIC}/class": "0x020000\n",
    f"{GPU}/vendor": "0x10de\n",
    f"{PORT}/state": "4: ACTIVE\n",
    f"{PORT}/link_layer": "Ethernet\n",
    f"{NIC}/infiniband_verbs/uverbs0/ibdev": "mlx5_0\n",
    "/dev/infiniband/uverbs0": "",
}
LINKS = {
    "/sys/bus/pci/devices/0000:18:00.0": GPU,
    "/sys/bus/pci/devices/0000:19:00.0": NIC,
    f"{GPU}/iommu_group": "/sys/kernel/iommu_groups/7",
    "/sys/class/infiniband/mlx5_0": f"{NIC}/infiniband/mlx5_0",
    f"{NIC}/infiniband/mlx5_0/device": NIC,
    "/sys/class/infiniband_verbs/uverbs0": f"{NIC}/infiniband_verbs/uverbs0",
    "/sys/class/net/eth0": f"{NIC}/net/eth0",
    f"{NIC}/net/eth0/device": NIC,
}
NETLINK = {"links": [{"index": 2, "IFLA_IFNAME": "eth0", "flags": 0x1043}]}
PLAUSIBLE = st.sampled_from(
    [
        b"-1\n",
        b"99999999999999999999999\n",
        b"0x\n",
        b"../../etc\n",
        b"a/b\0c\n",
        b"0::/../..//x\n",
        b"1:memory,cpu:/a\n",
        b"processor: 0\n\nprocessor: 1\n",
        "٣\n".encode(),
        b"NaN GT/s\n",
        b'[{"interface": ["x"], "mtu": 1e400}]',
        b'k8s.v1.cni.cncf.io/network-status="[{"\n',
        b"Iface Destination\neth0 00000000\n",
    ]
)
CONTENT = st.binary(max_size=600) | PLAUSIBLE | st.sampled_from([errno.EINVAL, errno.EACCES, errno.EIO, errno.ENODEV])
PROBES = (hostinfo.PROBE, limits.PROBE, pci.PROBE, rdma.PROBE, interfaces.PROBE)


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
@given(
    damage=st.dictionaries(st.sampled_from(FILES), CONTENT, min_size=1, max_size=12),
    gone=st.sets(st.sampled_from(sorted(LINKS)), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_any_bytes(probe: Probe[Any], damage: dict[str, Content], gone: set[str]) -> None:
    links = {path: target for path, target in LINKS.items() if path not in gone}
    host = DictHost(
        {**SOUND, **damage}, links, netlink=NETLINK, register_limit_bytes=1, shm=(1, 1), limits={"MEMLOCK": (1, 1)}
    )
    try:
        facts = reader(probe.name)(host)
    except UnavailableError:
        return
    assert {finding.code for finding in probe.check(facts)} <= set(probe.codes)
    families = {metric.name: metric for metric in probe.metrics}
    for sample in probe.samples(facts):
        assert len(sample.labels) == len(families[sample.metric].labels)


def test_the_sound_host_is_read_by_every_probe() -> None:
    host = DictHost(SOUND, LINKS, netlink=NETLINK)
    assert [type(reader(probe.name)(host)) for probe in PROBES] == [probe.facts for probe in PROBES]
