"""The recorded sick machines, and where a newcomer reads each fault: on the page, on the dashboards, in an alert."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One machine and what is wrong with it, in the words of each surface."""

    machine: str  # of tests/machines
    says: str  # on the page's first screen, in the first finding
    mend: str  # there too: a word of the remedy
    code: str
    severity: str  # of the finding, as the dashboards' table of what is wrong has it
    panel: str  # of the node dashboard: one that shows the fault itself
    drawn: str  # a label or value that this panel draws of the sick machine
    alert: str | None  # under way in Prometheus; None where no alert is meant for it
    place: int = 0  # among the page's findings: those before it are failures as well, of what else is wrong there


FAULTS = (
    Fault(machine="sick-h100-rdma-off", says="The NIC has no RDMA device", mend="mlx5_ib", code="pci.nic.no_rdma",
          severity="fail", panel="What is wrong", drawn="pci.nic.no_rdma", alert="TopoflightRdmaGone"),
    Fault(machine="sick-h100-dead-hca", says="mlx5_3:1: The port is DOWN", mend="switch port",
          code="rdma.port.down", severity="fail", panel="Nearest NIC", drawn="NODE",
          alert="TopoflightRdmaPortDown"),
    Fault(machine="sick-h100-gpu-lost", says="the driver cannot reach it", mend="Drain",
          code="gpu.device.lost", severity="fail", panel="GPUs that answer", drawn="0", alert="TopoflightGpuLost"),
    Fault(machine="sick-h100-memlock-64KiB", says="RLIMIT_MEMLOCK is 64 KiB", mend="unlimited",
          code="limits.memlock.low", severity="fail", panel="Memlock", drawn="65536",
          alert="TopoflightMemlockTooSmall"),
    Fault(machine="r760xa-2xA40-bf3-memlock-8MiB", says="RLIMIT_MEMLOCK is 8 MiB", mend="default_ulimits",
          code="limits.memlock.low", severity="fail", panel="Memlock", drawn="8388608",
          alert="TopoflightMemlockTooSmall", place=1),
    Fault(machine="r760xa-2xA40-bf3", says="NCCL takes eth0 by itself", mend="NCCL_SOCKET_IFNAME=net1",
          code="interfaces.choice.wrong", severity="fail", panel="Interface NCCL takes", drawn="eth0",
          alert="TopoflightWrongInterface"),
    Fault(machine="sick-h100-no-peermem", says="Neither nvidia_peermem nor DMA-BUF", mend="nvidia_peermem",
          code="pci.peermem.missing", severity="fail", panel="GPUDirect RDMA modules", drawn="0",
          alert="TopoflightGdrdmaImpossible"),
    Fault(machine="sick-h100-nvlink-missing", says="GPU3 has 16 of 18 NVLinks active", mend="Reset the GPU",
          code="gpu.nvlink.missing", severity="fail", panel="NVLinks between GPUs", drawn="16",
          alert="TopoflightNvlinkDegraded"),
    Fault(machine="sick-h100-thermal", says="GPU7 is slowed down to 345 of 1980 MHz", mend="power supplies",
          code="gpu.power.brake", severity="fail", panel="What holds the clocks down", drawn="hw_thermal",
          alert="TopoflightThermalThrottling"),
    Fault(machine="sick-l40s-x4", says="GPU2 runs at x4", mend="Reseat", code="pci.link.width", severity="fail",
          panel="PCIe width in use", drawn="0.25", alert="TopoflightPcieLinkDegraded"),
    Fault(machine="azure-nd-a100-flat-vm", says="The PCIe tree is not the machine's own", mend="NCCL_TOPO_FILE",
          code="pci.tree.virtual", severity="warn", panel="What is wrong", drawn="pci.tree.virtual", alert=None),
)  # fmt: skip
