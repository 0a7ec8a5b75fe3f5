"""GPUs of the PCI bus beside those that NVML lists: which one is missing, and which was never given to this process.

sysfs shows every GPU of the machine, in a container too; NVML lists those whose device node this process may open. So a
GPU that NVML leaves out is a fault only where its node can be opened, or where nothing keeps this process from it. In a
container that asked for all GPUs a missing node proves nothing: the toolkit makes nodes only for GPUs that NVML listed.

Sources: NVML API reference, nvmlDeviceGetCount_v2; NVIDIA driver README, "Device Minor" in
/proc/driver/nvidia/gpus/*/information; NVIDIA Container Toolkit (device nodes, and in its legacy mode the folders of
/proc/driver/nvidia/gpus, of the GPUs given only); Linux fs/namei.c, inode_permission: access(2) asks the device cgroup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from contracts.finding import Finding
from hardware.gpus import NVIDIA
from probes.gpu.facts import BusGpu, GpuBus
from probes.gpu.health import finding
from probes.host import sysfs
from probes.host.protocol import Host
from probes.hostinfo.container import container
from probes.pci.facts import is_passed_through

PCI = "/sys/bus/pci/devices"
PROC = "/proc/driver/nvidia/gpus"
NODES_MAX = 64  # as many GPUs as the probe asks about


def read_bus(host: Host) -> GpuBus | None:
    """The bus as sysfs shows it; None without sysfs."""
    try:
        addresses = [name for name in host.list_dir(PCI) if sysfs.BUS_ID.fullmatch(name)]
    except OSError:
        return None
    found = tuple(gpu for address in addresses if (gpu := _gpu(host, address)) is not None)[:NODES_MAX]
    nodes = sum(sysfs.usable(host, f"/dev/nvidia{n}") or False for n in range(len(found)))
    visible = host.environment().get("NVIDIA_VISIBLE_DEVICES", "").strip()
    return GpuBus(
        gpus=found, container=container(host) if found else None, nodes=nodes,
        requested=_requested(visible), all_requested=visible == "all",
    )  # fmt: skip


def _requested(visible: str) -> int | None:
    """How many GPUs the variable names, by index or UUID; "void" and "none" leave it to a device list (CDI) or none."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not names or names[0] in ("all", "void", "none") or any("MIG" in name or ":" in name for name in names):
        return None
    return len(set(names))


def _gpu(host: Host, address: str) -> BusGpu | None:
    folder = f"{PCI}/{address}"
    if sysfs.number(host, f"{folder}/vendor") != NVIDIA or (sysfs.number(host, f"{folder}/class") or 0) >> 16 != 0x03:
        return None
    driver = sysfs.target_name(host, f"{folder}/driver")
    if is_passed_through(driver) or sysfs.target_name(host, f"{folder}/physfn") is not None:
        return None
    match = re.search(r"^Device Minor:\s*(\d{1,3})\s*$", sysfs.text(host, f"{PROC}/{address}/information") or "", re.M)
    minor = int(match[1]) if match else None
    there = None if minor is None else host.exists(f"/dev/nvidia{minor}")
    usable = bool(sysfs.usable(host, f"/dev/nvidia{minor}")) if there else None
    return BusGpu(bus_id=address, driver=driver, minor=minor, node_exists=there, node_usable=usable)


def check_bus(bus: GpuBus | None, listed: set[str], count: int) -> Iterator[Finding]:
    """GPUs of the bus under NVIDIA's driver that NVML does not list; `listed` are its addresses, `count` its number.

    Where NVML gives fewer addresses than GPUs (a lost one, a virtual machine that hides them) only the number counts.
    """
    if bus is None:
        return
    bound = [gpu for gpu in bus.gpus if gpu.driver == "nvidia"]
    absent = [gpu for gpu in bound if gpu.bus_id not in listed]
    unplaced = max(0, count - len(listed))
    if not absent or len(absent) <= unplaced:
        return
    assigned = {gpu: _is_assigned(gpu, bus, count) for gpu in absent}
    missing = [gpu for gpu in absent if assigned[gpu]]
    if len(missing) > unplaced:
        yield _missing(missing, bound, count, unplaced)
    if others := [gpu for gpu in absent if not assigned[gpu]]:
        yield _not_assigned(others, bound, count, bus, doubtful=None in (assigned[gpu] for gpu in others))


def _is_assigned(gpu: BusGpu, bus: GpuBus, count: int) -> bool | None:
    """Whether this process was to see the GPU; None where that cannot be told.

    What a container or a device cgroup keeps from this process is none of its own.
    """
    if gpu.node_exists:
        return bool(gpu.node_usable)  # a device cgroup (Slurm, a container engine) refuses the node
    if bus.container is None and bus.requested is None and not bus.all_requested:
        return True  # on the host itself nothing is given away
    if bus.requested is not None:
        return bus.requested > count
    # A container has no node of it, or the toolkit hides it in /proc: it was given to others, unless there are nodes
    # that NVML does not use, or all were asked for.
    return True if bus.nodes > count else None if bus.all_requested else False


def _missing(gpus: list[BusGpu], bound: list[BusGpu], count: int, unplaced: int) -> Finding:
    names = ", ".join(gpu.bus_id for gpu in gpus)
    which = names if not unplaced else f"{len(gpus) - unplaced} of {names}"
    one = len(gpus) == 1
    seen = (f"nvmlDeviceGetCount = {count}", *(f"{PCI}/{gpu.bus_id}/driver: nvidia; {_node(gpu)}" for gpu in gpus[:8]))
    return finding(
        "gpu.device.missing", ", ".join(gpu.bus_id for gpu in gpus[:8]), evidence=seen, count=count, bound=len(bound),
        which=which, are="is" if one else "are", them="it" if one else "them",
    )  # fmt: skip


def _not_assigned(others: list[BusGpu], bound: list[BusGpu], count: int, bus: GpuBus, *, doubtful: bool) -> Finding:
    names = ", ".join(gpu.bus_id for gpu in others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
    place = f"this {bus.container} container" if bus.container else "this process"
    # where none was given nothing was read: then the machine's GPUs are unknown, not fine
    known = bool(count) and not doubtful
    why = " NVIDIA_VISIBLE_DEVICES=all requests them. Whether the driver or another container has them is unknown."
    return finding(
        "gpu.device.not_given" + " unknown" * (not known), ", ".join(gpu.bus_id for gpu in others[:8]),
        evidence=tuple(f"{PCI}/{gpu.bus_id}/driver: nvidia; {_node(gpu)}" for gpu in others[:8]),
        count=len(others), bound=len(bound), place=place, names=names, why=why if doubtful else "",
    )  # fmt: skip


def _node(gpu: BusGpu) -> str:
    if gpu.minor is None:
        return f"{PROC}/{gpu.bus_id}: not there"
    if not gpu.node_exists:
        return f"/dev/nvidia{gpu.minor}: not there"
    return f"/dev/nvidia{gpu.minor}: {'can be opened' if gpu.node_usable else 'may not be opened'}"
