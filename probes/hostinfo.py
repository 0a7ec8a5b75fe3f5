"""The machine itself: CPU, NUMA, memory, kernel, virtualisation.

Specification: proc(5), sysfs-devices-node, DMI. The file is not called host.py because that is the Host a probe asks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node (/sys/devices/system/node/node*)."""

    node: int
    cpus: str  # "0-47,96-143"
    memory_bytes: int | None = None
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostinfoFacts:
    """What kind of machine this is."""

    hostname: str
    kernel: str | None = None
    os: str | None = None
    architecture: str | None = None  # "x86_64", "aarch64"
    cpu_vendor: str | None = None  # "GenuineIntel", "AuthenticAMD", "ARM"
    cpu_name: str | None = None
    cpu_family: int | None = None
    cpu_model: int | None = None  # NCCL's CPU-to-CPU bandwidth depends on it
    sockets: int | None = None
    cores: int | None = None
    threads: int | None = None
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    numa: tuple[NumaNode, ...] = ()
    virtual_machine: str | None = None  # hypervisor's name; None bare metal or unknown
    product: str | None = None  # DMI: "PowerEdge R760xa", "p4d.24xlarge"
    vendor: str | None = None
    boot_id: str | None = None
    load: float | None = None  # 1-minute load average
    nccl_environment: dict[str, str] | None = None  # NCCL_*, GLOO_*, TORCH_NCCL_*, FI_*, NVIDIA_VISIBLE_DEVICES
    nccl_conf: dict[str, str] | None = None  # /etc/nccl.conf, ~/.nccl.conf
