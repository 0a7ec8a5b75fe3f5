"""Hosts made by hand for the tests of the NCCL environment: only the facts that a rule asks for."""

from collections.abc import Sequence

from planner.advice import Recommendation
from planner.nccl_env import environment
from planner.nccl_env.situation import make_situation
from probes.api import Ok, Snapshot
from probes.gpu.facts import Gpu, GpuFacts, NvLink
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import Interface, InterfacesFacts
from probes.limits.probe import LimitsFacts
from probes.pci.facts import PciDevice, PciFacts
from probes.rdma.facts import Gid, RdmaDevice, RdmaFacts, RdmaPort
from topology.graph import ClusterTopology, NearestNic, NodeTopology

GBIT = 1e9 / 8


def settings(*given, **more) -> Recommendation:
    """What is advised in a situation."""
    return environment.settings(make_situation(*given, **more))


def interface(name: str, role: str, address: str = "10.0.0.1/24", **more) -> Interface:
    """An interface that is up and running."""
    addresses = (address,) if address else ()
    return Interface(**{"name": name, "role": role, "up": True, "running": True, "addresses": addresses, **more})


def port(name: str, *, layer: str = "InfiniBand", gbit: float = 400, gids: Sequence[Gid] = (), **more) -> RdmaDevice:
    """A device with one port; `more` are members of either."""
    of_device = {"kind": "hca", "model": "ConnectX-7", "is_vf": more.pop("vf", None)}
    of_device |= {key: more.pop(key) for key in ("kind", "model", "driver") if key in more}
    of_port = {"state": "ACTIVE", "link_layer": layer, "rate_bytes_per_second": gbit * GBIT, **more}
    one = RdmaPort(port=1, gids=tuple(gids), gids_known=bool(gids), **of_port)
    return RdmaDevice(name=name, ports=(one,), **of_device)


def pci(bus_id: str, class_code: int, vendor: int, *, driver: str | None = None, **more) -> PciDevice:
    """A PCI function."""
    return PciDevice(bus_id=bus_id, class_code=class_code, vendor_id=vendor, device_id=0x1000, driver=driver, **more)


def v2_gid(index: int, address: str = "10.0.0.1") -> Gid:
    """An IPv4-mapped RoCE v2 entry as sysfs prints it."""
    high, low = (int(a) * 256 + int(b) for a, b in zip(address.split(".")[::2], address.split(".")[1::2], strict=True))
    return Gid(index=index, gid=f"0000:0000:0000:0000:0000:ffff:{high:04x}:{low:04x}", type="RoCE v2")


def host(
    name: str = "a", *, gpus: int = 8, gpu_name: str | None = None, nvlink: bool = True, c2c: int | None = None,
    rdma: Sequence[RdmaDevice] | None = (), interfaces: Sequence[Interface] | None = (),
    default_route: str | None = None, cgroup_cpus: float | None = None, bus: Sequence[PciDevice] | None = None,
    switches: dict | None = None, **info,
) -> Snapshot:  # fmt: skip
    """A snapshot of the facts given; None leaves the probe out."""
    links = (NvLink(link=0, active=True),) if nvlink else ()
    made = (Gpu(index=i, bus_id=None, name=gpu_name, nvlinks=links, nvlinks_known=True, c2c_links=c2c)
            for i in range(gpus))  # fmt: skip
    facts: dict = {
        "gpu": GpuFacts(driver_version="570", cuda_version="12.8", gpus=tuple(made)),
        "hostinfo": HostinfoFacts(**{"hostname": name, "cores": 64, **info}),
        "limits": LimitsFacts(
            whose="this process", uid=0, memlock_soft_bytes=65536, memlock_hard_bytes=65536, cgroup_cpus=cgroup_cpus
        ),
    }
    if rdma is not None:
        facts["rdma"] = RdmaFacts(devices=tuple(rdma))
    if interfaces is not None:
        facts["interfaces"] = InterfacesFacts(interfaces=tuple(interfaces), default_route=default_route)
    if bus is not None or switches is not None:
        facts["pci"] = PciFacts(devices=tuple(bus or ()), **(switches or {}))
    outcomes = {probe: Ok(facts=value) for probe, value in facts.items()}
    return Snapshot(hostname=name, taken_at_seconds=0.0, outcomes=dict(outcomes))


def cluster(
    *snapshots: Snapshot, nearest: Sequence[str] = (), virtual: str | None = None,
    crowded: dict[int, tuple[str, ...]] | None = None,
) -> ClusterTopology:  # fmt: skip
    """Topology of the hosts: only what rules ask for. `nearest` is the NIC nearest to each GPU, `crowded` several."""
    more = crowded or {}
    near = tuple(
        NearestNic(gpu=f"GPU{i}", label="PIX", path=None, nics=more.get(i, (nic,)), local=True, decidable=True)
        for i, nic in enumerate(nearest)
    )
    nodes = (NodeTopology(hostname=each.hostname, gpus=(), nics=(), pairs=(), nearest_nic=near, virtual=virtual)
             for each in snapshots)  # fmt: skip
    return ClusterTopology(nodes=tuple(nodes))
