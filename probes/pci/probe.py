"""Checks of the PCIe tree: degraded links, redirected peer-to-peer traffic, NICs that cannot reach GPU memory.

Sources: NCCL user guide, Troubleshooting ("GPU Direct", "PCI Access Control Services", "IO Virtualization"); Linux
drivers/pci (an idle GPU lowers the speed of its link, never the width).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from contracts.finding import Finding, Status
from contracts.tables import read_table
from hardware.gpus import NVIDIA
from hardware.nics import MELLANOX, is_efa, is_virtual
from hardware.units import some
from probes.api import Sample, finding, probe_of, sample_facts
from probes.pci.facts import (
    AMD,
    DEVICES,
    HABANA,
    SOURCE,
    UNSUPPORTED,
    PciDevice,
    PciFacts,
    ancestors,
    is_bridge,
    is_gpu,
    is_network,
    is_passed_through,
    list_nvidia_gpus,
    list_other_gpus,
)

MAX_EVIDENCE = 16
INFINIBAND_CLASS = 0x0207
_DISPLAY, _ACCELERATOR = 0x0380, 0x1200  # display controller without VGA; processing accelerator

TEXTS = read_table(__file__, "findings.toml")


def list_gpus(facts: PciFacts) -> tuple[PciDevice, ...]:
    """Return NVIDIA GPUs for use by this host: none passed to a virtual machine, and no virtual function of those."""
    return tuple(d for d in list_nvidia_gpus(facts) if not is_passed_through(d.driver) and d.physical_function is None)


def count_bare_metal_gpus(facts: PciFacts) -> int | None:
    """Count NVIDIA GPUs on the bus, including GPUs passed to virtual machines; None in a container or VM.

    A container or VM may see fewer GPUs than the board has, which is not a fault.
    """
    if facts.hypervisor is not None or facts.container is not None:
        return None
    return sum(device.physical_function is None for device in list_nvidia_gpus(facts))


def list_foreign_accelerators(facts: PciFacts) -> tuple[PciDevice, ...]:
    """Return other vendors' accelerators: processing accelerators, and AMD display controllers without VGA (Instinct).

    VGA controllers of other vendors are for screens (management controllers, integrated graphics) and are left out.
    """
    return tuple(
        d
        for d in facts.devices
        if d.vendor_id != NVIDIA
        and d.physical_function is None
        and not is_passed_through(d.driver)
        and (d.class_code >> 8 == _ACCELERATOR or (d.class_code >> 8 == _DISPLAY and d.vendor_id == AMD))
    )


def list_hcas(facts: PciFacts) -> tuple[PciDevice, ...]:
    """Return network functions made for RDMA (InfiniBand, EFA, ConnectX, BlueField) or with an RDMA device.

    A virtual function without an RDMA device may be Ethernet only, or belong to another pod. It is left out.
    """
    return tuple(
        d
        for d in facts.devices
        if is_network(d.class_code) and not is_passed_through(d.driver) and (bool(d.rdma) or _is_made_for_rdma(d))
    )


def _is_made_for_rdma(device: PciDevice) -> bool:
    if device.physical_function is not None:
        return False
    if device.class_code >> 8 == INFINIBAND_CLASS or is_efa(device.vendor_id, device.device_id):
        return True
    # a virtual function in a VM has no link to its physical function, and may be Ethernet only
    return device.vendor_id == MELLANOX and not is_virtual(device.vendor_id, device.device_id)


def check(facts: PciFacts) -> Iterator[Finding]:
    """Check each device, then the host-wide settings."""
    for device in facts.devices:
        yield from _check_device(device)
        yield from _check_link(facts, device)
    if facts.hypervisor is None:
        yield from _check_acs(facts)
        yield from _check_iommu(facts)
    if gpus := list_other_gpus(facts):
        evidence = tuple(
            f"{DEVICES}/{d.bus_id}: class 0x{d.class_code:06x}, vendor 0x{d.vendor_id:04x}, driver {d.driver}"
            for d in gpus[:MAX_EVIDENCE]
        )
        library = "hccl" if gpus[0].vendor_id == HABANA else "rccl"
        fields = {"count": len(gpus), "gpus": UNSUPPORTED[library], "library": library.upper()}
        yield finding(TEXTS, "pci.gpu.unsupported", Status.UNKNOWN, "", evidence, **fields)
    yield from _check_rdma(facts)
    yield from _check_peermem(facts)
    yield from _check_virtual_tree(facts)


def _list_rdma_nics(facts: PciFacts) -> list[PciDevice]:
    return [d for d in facts.devices if is_network(d.class_code) and d.rdma and d.physical_function is None]


def _check_device(device: PciDevice) -> Iterator[Finding]:
    driver = device.driver
    keys = []
    if device.lost:
        keys.append("pci.device.lost")
    gpu = is_gpu(device.class_code) and device.vendor_id == NVIDIA and device.physical_function is None
    if gpu and is_passed_through(driver):
        keys.append("pci.device.passed_through")
    if gpu and driver in (None, "nouveau"):
        keys.append("pci.device.no_driver" + " nouveau" * (driver is not None))
    for key in keys:
        yield finding(TEXTS, key, subject=device.bus_id, where=f"{DEVICES}/{device.bus_id}", driver=driver)


def _get_smaller(facts: PciFacts, device: PciDevice, fact: str) -> Any:
    """Return the smaller value of the device and its upstream bridge; None if the device's own value is unknown."""
    above = [getattr(d, fact) for d in facts.devices if d.bus_id == device.parent]
    value = getattr(device, fact)
    return min([value, *filter(None, above)]) if value else None


def _check_link(facts: PciFacts, device: PciDevice) -> Iterator[Finding]:
    gpu = is_gpu(device.class_code) and device.vendor_id == NVIDIA
    # A bridge is only checked directly below a root port, because there both ends of one link are known. Inside a
    # switch, parent and child are not connected by a link. VFs have no link of their own.
    uplink = is_bridge(device.class_code) and any(d.bus_id == device.parent and d.parent is None for d in facts.devices)
    if not (gpu or uplink or is_network(device.class_code)) or device.physical_function is not None:
        return
    folder, name = f"{DEVICES}/{device.bus_id}", _describe_device(device)
    width, possible = device.link_width, _get_smaller(facts, device, "link_width_max")
    if width and possible and width < possible:
        status = Status.FAIL if gpu or device.rdma or uplink else Status.WARN
        evidence = (f"{folder}/current_link_width: {width}", f"{folder}/max_link_width: {device.link_width_max}")
        values = {"width": width, "possible": possible, "share": width / possible}
        yield finding(TEXTS, "pci.link.width", status, device.bus_id, evidence, what=name, **values)
    speed, fastest = device.link_transfers_per_second, _get_smaller(facts, device, "link_transfers_per_second_max")
    # GPUs lower their link speed when idle, and the switch above does the same, so an idle link is not checked.
    if is_network(device.class_code) and speed and fastest and speed < fastest:
        highest = (device.link_transfers_per_second_max or 0) / 1e9
        evidence = (f"{folder}/current_link_speed: {speed / 1e9:g} GT/s", f"{folder}/max_link_speed: {highest:g} GT/s")
        rates = {"speed": speed / 1e9, "fastest": fastest / 1e9}
        yield finding(TEXTS, "pci.link.speed", Status.WARN, device.bus_id, evidence, what=name, **rates)


def _describe_device(device: PciDevice) -> str:
    if is_gpu(device.class_code):
        return "The GPU"
    return "The NIC" if is_network(device.class_code) else "The switch's uplink"


def list_peer_ports(facts: PciFacts) -> set[str]:
    """Return the ports that traffic between two GPUs, or a GPU and an RDMA NIC, crosses below their common bridge."""
    parents = {d.bus_id: d.parent for d in facts.devices}
    ends = list_gpus(facts)
    chains = {d.bus_id: ancestors(parents, d.bus_id) for d in (*ends, *_list_rdma_nics(facts))}
    ports: set[str] = set()
    for a, b in combinations(chains, 2):
        if all(d.bus_id not in (a, b) for d in ends):
            continue
        shared = set(chains[a]) & set(chains[b])
        if shared:
            ports |= {port for chain in (chains[a], chains[b]) for port in chain if port not in shared}
    return ports


def _check_acs(facts: PciFacts) -> Iterator[Finding]:
    ports = list_peer_ports(facts)
    judged = [d for d in facts.devices if d.bus_id in ports]
    redirecting = [d.bus_id for d in judged if d.acs_redirects]
    if redirecting:  # only ports on paths between GPUs and their peers are checked
        evidence = tuple(f"{DEVICES}/{b}/config: ACS Control, redirection on" for b in redirecting[:MAX_EVIDENCE])
        yield finding(TEXTS, "pci.acs.on", Status.FAIL, "", evidence, count=len(redirecting))
    elif any(d.acs_redirects is None for d in judged):
        evidence = tuple(f"{DEVICES}/{p}/config: extended part not readable" for p in sorted(ports)[:MAX_EVIDENCE])
        yield finding(TEXTS, "pci.acs.unknown", Status.UNKNOWN, "", evidence)


def _check_iommu(facts: PciFacts) -> Iterator[Finding]:
    ends = len(list_gpus(facts)) + len(_list_rdma_nics(facts))
    if facts.iommu_mode == "translated" and list_gpus(facts) and ends > 1:
        # Traffic of devices on one switch is then sent through the root complex. Other traffic takes this path anyway.
        status = Status.FAIL if list_peer_ports(facts) else Status.WARN
        evidence = ("/sys/kernel/iommu_groups/*/type of GPUs and NICs: DMA",)
        yield finding(TEXTS, "pci.iommu.translated", status, "", evidence)


def _check_rdma(facts: PciFacts) -> Iterator[Finding]:
    """Report RDMA cards without an RDMA device: the RDMA part of their driver is not loaded or is disabled."""
    for device in facts.devices:
        made_for_it = device.class_code >> 8 == INFINIBAND_CLASS or is_efa(device.vendor_id, device.device_id)
        # the RDMA device of a virtual function may be in the network namespace of a pod
        theirs = device.physical_function is not None and not made_for_it
        if device.rdma is not False or theirs or is_passed_through(device.driver):
            continue
        if not (made_for_it or device.driver == "mlx5_core" or device in list_hcas(facts)):
            continue
        # Ethernet cards may serve storage or management, but not if a GPU node has no other card with RDMA. Of the only
        # card of a virtual machine, the provider may have turned RDMA off.
        nics = [d for d in facts.devices if is_network(d.class_code)]
        alone = bool(list_gpus(facts)) and not any(d.rdma for d in nics) and (facts.hypervisor is None or len(nics) > 1)
        status = Status.FAIL if made_for_it or alone else Status.WARN
        place = " in this container, which may be another network namespace's" if facts.container else ""
        evidence = (f"{DEVICES}/{device.bus_id}/infiniband: missing", f"driver: {device.driver or 'none'}")
        status = Status.UNKNOWN if facts.container else status
        yield finding(TEXTS, "pci.nic.no_rdma", status, device.bus_id, evidence, where=place)


def _check_peermem(facts: PciFacts) -> Iterator[Finding]:
    nics = [d for d in facts.devices if is_network(d.class_code) and d.rdma]
    if not list_gpus(facts) or not nics or facts.peermem_loaded or facts.dmabuf_possible:
        return
    is_known = facts.peermem_loaded is False and facts.dmabuf_possible is False
    loaded, opened, dmabuf = (
        "unknown" if fact is None else "yes" if fact else "no"
        for fact in (facts.peermem_loaded, facts.nvidia_open_module, facts.dmabuf_possible)
    )
    key = "pci.peermem.missing" if is_known else "pci.peermem.unknown"
    yield finding(TEXTS, key, loaded=loaded, opened=opened, dmabuf=dmabuf)


def _check_virtual_tree(facts: PciFacts) -> Iterator[Finding]:
    if facts.virtual_tree is None or not list_gpus(facts):
        return
    files = facts.topology_files
    evidence = tuple(f"{d.bus_id} below {d.parent or d.root}" for d in list_gpus(facts)[:MAX_EVIDENCE]) + files
    # with one GPU and no RDMA NIC there is only one path
    alone = len(list_gpus(facts)) == 1 and not _list_rdma_nics(facts)
    used = facts.topology_file
    key = "pci.tree.virtual" + (" used" if used else " alone" if alone else " files" * bool(files))
    yield finding(TEXTS, key, None, "", evidence, why=facts.virtual_tree, files=some(files, limit=4), used=used)


def samples(facts: PciFacts) -> Iterator[Sample]:
    """Export the host-wide settings, and the fraction of the maximum link width of each GPU and NIC."""
    yield from sample_facts(__file__, facts)
    if facts.iommu_mode:
        yield Sample(metric="pci_iommu_info", value=1, labels=(facts.iommu_mode,))
    acs = [d.acs_redirects for d in facts.devices if d.acs_redirects is not None]
    if acs:
        yield Sample(metric="pci_acs_redirecting_ports", value=float(sum(acs)))
    for device in facts.devices:
        width, possible = device.link_width, _get_smaller(facts, device, "link_width_max")
        if not is_bridge(device.class_code) and width and possible:
            yield Sample(metric="pci_link_width_ratio", value=width / possible, labels=(device.bus_id,))


PROBE = probe_of(__file__, SOURCE, check, samples=samples)
