"""Catalogue machines for what-if questions: what a cloud instance or a server looks like, as data with its source.

Sources: NCCL topology files shipped by the cloud makers (aws-ofi-nccl topology/*.xml, Azure azhpc-images
ndv*-topo.xml), the makers' instance pages for NIC counts and rates, published nvidia-smi topo -m outputs.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from hardware.gpus import gpu_named
from planner.forecast.hardware import GIGA
from topology.complete import with_gpus
from topology.expect import node_expectations
from topology.graph import ClusterTopology, GpuNode, Island, NearestNic, NicNode, NodeTopology, Pair, PathClass
from topology.nccl import nvlink_bytes_per_second
from topology.reach_paths import with_reach


class MachineError(ValueError):
    """A machine that the catalogue does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One row of the catalogue."""

    name: str
    gpu: str
    gpus: int
    nvlinks: int  # per pair in all-to-all islands; 0 none
    island: int  # GPUs per island
    nics: int
    nic_gbps: float  # each
    nic_kind: str  # "efa", "hca", "ethernet"
    cpus: int
    source: str
    aliases: tuple[str, ...] = ()
    nvlink_nodes: int = 1  # nodes of one NVLink domain
    host_gib: float | None = None  # memory of the host by the maker's page; None where it varies


def _m(
    name: str, gpu: str, gpus: int, nvlinks: int, island: int, nics: int, gbps: float, kind: str, cpus: int,
    source: str, *aliases: str, nvlink_nodes: int = 1, host: float | None = None,
) -> Machine:  # fmt: skip
    return Machine(
        name=name, gpu=gpu, gpus=gpus, nvlinks=nvlinks, island=island, nics=nics, nic_gbps=gbps, nic_kind=kind,
        cpus=cpus, source=source, aliases=aliases, nvlink_nodes=nvlink_nodes, host_gib=host,
    )  # fmt: skip


_AWS = "AWS EC2 instance page"
_HGX = "NVIDIA HGX/DGX user guide"
_GCP = "Google Cloud GPU machine types"
_AZURE = "azhpc-images ndv4-topo.xml and ndv5-topo.xml, Azure ND size pages"
_OCI = "oracle-quickstart/oci-hpc-oke, OCI shape pages"
CATALOGUE: tuple[Machine, ...] = (
    _m("p3.16xlarge", "Tesla V100-SXM2-16GB", 8, 1, 8, 1, 25, "ethernet", 64, _AWS, host=488),
    _m("p4d.24xlarge", "NVIDIA A100-SXM4-40GB", 8, 12, 8, 4, 100, "efa", 96, _AWS, "p4d", host=1152),
    _m("p4de.24xlarge", "NVIDIA A100-SXM4-80GB", 8, 12, 8, 4, 100, "efa", 96, _AWS, "p4de", host=1152),
    _m("p5.48xlarge", "NVIDIA H100 80GB HBM3", 8, 18, 8, 32, 100, "efa", 192, _AWS, "p5", host=2048),
    _m("p5e.48xlarge", "NVIDIA H200", 8, 18, 8, 32, 100, "efa", 192, _AWS, "p5e", host=2048),
    _m("p5en.48xlarge", "NVIDIA H200", 8, 18, 8, 16, 200, "efa", 192, _AWS, "p5en", host=2048),
    _m("p6-b200.48xlarge", "NVIDIA B200", 8, 18, 8, 8, 400, "efa", 192, _AWS, "p6-b200", host=2048),
    _m("p6-b300.48xlarge", "NVIDIA B300", 8, 18, 8, 16, 400, "efa", 192, _AWS, "p6-b300"),
    # An UltraServer of 18 has 28.8 Tb/s of EFA.
    _m("p6e-gb200.36xlarge", "NVIDIA GB200", 4, 18, 4, 4, 400, "efa", 144, _AWS, "p6e-gb200", nvlink_nodes=18),
    _m("g5.12xlarge", "NVIDIA A10G", 4, 0, 1, 1, 40, "ethernet", 48, _AWS, host=192),
    _m("g5.48xlarge", "NVIDIA A10G", 8, 0, 1, 1, 100, "efa", 192, _AWS, "g5", host=768),
    _m("g6e.48xlarge", "NVIDIA L40S", 8, 0, 1, 4, 100, "efa", 192, _AWS, "g6e", host=1536),
    _m("a2-highgpu-8g", "NVIDIA A100-SXM4-40GB", 8, 12, 8, 1, 100, "ethernet", 96, _GCP, host=680),
    _m("a3-highgpu-8g", "NVIDIA H100 80GB HBM3", 8, 18, 8, 4, 200, "ethernet", 208, _GCP, host=1872),
    _m("a3-megagpu-8g", "NVIDIA H100 80GB HBM3", 8, 18, 8, 8, 200, "ethernet", 208, _GCP, host=1872),
    _m("a3-ultragpu-8g", "NVIDIA H200", 8, 18, 8, 8, 400, "hca", 224, _GCP, host=2952),
    _m("a4-highgpu-8g", "NVIDIA B200", 8, 18, 8, 8, 400, "hca", 224, _GCP),
    _m("ND96asr_v4", "NVIDIA A100-SXM4-40GB", 8, 12, 8, 8, 200, "hca", 96, _AZURE, "ndv4", host=900),
    _m("ND96amsr_A100_v4", "NVIDIA A100-SXM4-80GB", 8, 12, 8, 8, 200, "hca", 96, _AZURE, host=1900),
    _m("ND96isr_H100_v5", "NVIDIA H100 80GB HBM3", 8, 18, 8, 8, 400, "hca", 96, _AZURE, "ndv5", host=1900),
    _m("ND96isr_H200_v5", "NVIDIA H200", 8, 18, 8, 8, 400, "hca", 96, _AZURE),
    _m("ND128isr_GB200_v6", "NVIDIA GB200", 4, 18, 4, 4, 400, "hca", 128, _AZURE, nvlink_nodes=18),
    _m("BM.GPU4.8", "NVIDIA A100-SXM4-40GB", 8, 12, 8, 16, 100, "hca", 64, _OCI, host=2048),
    _m("BM.GPU.H100.8", "NVIDIA H100 80GB HBM3", 8, 18, 8, 16, 200, "hca", 112, _OCI, host=2048),
    _m("BM.GPU.H200.8", "NVIDIA H200", 8, 18, 8, 8, 400, "hca", 112, _OCI),
    _m("dgx-a100", "NVIDIA A100-SXM4-80GB", 8, 12, 8, 8, 200, "hca", 128, _HGX, "a100", host=2048),
    _m("dgx-h100", "NVIDIA H100 80GB HBM3", 8, 18, 8, 8, 400, "hca", 112, _HGX, "hgx-h100", "h100", host=2048),
    _m("dgx-h200", "NVIDIA H200", 8, 18, 8, 8, 400, "hca", 112, _HGX, "hgx-h200", "h200", host=2048),
    _m("dgx-b200", "NVIDIA B200", 8, 18, 8, 8, 400, "hca", 112, _HGX, "hgx-b200", "b200", host=2048),
    _m("gb200-nvl72", "NVIDIA GB200", 4, 18, 4, 4, 400, "hca", 144, _HGX, "gb200", nvlink_nodes=18),
    _m("4xl40s", "NVIDIA L40S", 4, 0, 1, 1, 200, "hca", 64, "generic PCIe server", "l40s"),
    _m("2xa40-roce", "NVIDIA A40", 2, 0, 1, 2, 200, "hca", 64,
       "Dell PowerEdge R760xa with BlueField-3, Red Hat article on GPUDirect RDMA", "a40"),
    _m("4xrtx4090", "NVIDIA GeForce RTX 4090", 4, 0, 1, 1, 10, "ethernet", 32, "generic workstation", "rtx4090"),
)  # fmt: skip


def names() -> tuple[str, ...]:
    """Every machine `get` answers for."""
    return tuple(machine.name for machine in CATALOGUE)


def machine(name: str) -> Machine:
    """A row of the catalogue by name or alias."""
    wanted = name.strip().lower()
    for row in CATALOGUE:
        if wanted == row.name.lower() or wanted in row.aliases:
            return row
    near = difflib.get_close_matches(wanted, [row.name for row in CATALOGUE], n=3, cutoff=0.4)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise MachineError(f"machine={name!r}: not in the catalogue{hint}; all: {', '.join(names())}")


def get(name: str, hostname: str | None = None) -> NodeTopology:
    """One node of the catalogue as a topology, as good as one read from a host for planning."""
    row = machine(name)
    gpu = gpu_named(row.gpu)
    gpus = tuple(
        GpuNode(
            name=f"GPU{i}",
            index=i,
            model=row.gpu,
            memory_bytes=int(gpu.memory_bytes) if gpu else None,
            compute_capability=gpu.compute_capability if gpu else None,
            numa_node=i * 2 // row.gpus,
        )
        for i in range(row.gpus)
    )
    rate = row.nic_gbps * GIGA / 8.0
    nics = tuple(
        NicNode(
            name=f"{'efa' if row.nic_kind == 'efa' else 'mlx5' if row.nic_kind == 'hca' else 'eth'}_{i}",
            kind=row.nic_kind,
            rate_bytes_per_second=rate,
            active=True,
            numa_node=i * 2 // row.nics if row.nics > 1 else 0,
        )
        for i in range(row.nics)
    )
    per_link = nvlink_bytes_per_second(gpu.compute_capability if gpu else None)
    plan = per_link * row.nvlinks if per_link and row.nvlinks else None
    pairs = []
    for a in range(row.gpus):
        for b in range(a + 1, row.gpus):
            if row.nvlinks and a // row.island == b // row.island:
                pairs.append(Pair(a=f"GPU{a}", b=f"GPU{b}", label=f"NV{row.nvlinks}", path=PathClass.NVL,
                                  nvlinks=row.nvlinks, bytes_per_second=plan, evidence="catalogue"))  # fmt: skip
            else:
                same = gpus[a].numa_node == gpus[b].numa_node
                pairs.append(Pair(a=f"GPU{a}", b=f"GPU{b}", label="NODE" if same else "SYS",
                                  path=PathClass.PHB if same else PathClass.SYS, evidence="catalogue"))  # fmt: skip
    near = []
    for i, device in enumerate(gpus):
        mine = [
            n.name
            for j, n in enumerate(nics)
            if j * row.gpus // row.nics == i or (row.nics < row.gpus and j == i * row.nics // row.gpus)
        ]
        for nic in nics:
            local = nic.name in mine
            same = device.numa_node == nic.numa_node
            label = "PIX" if local else "NODE" if same else "SYS"
            path = PathClass.PIX if local else PathClass.PHB if same else PathClass.SYS
            pairs.append(Pair(a=device.name, b=nic.name, label=label, path=path, evidence="catalogue"))
        near.append(NearestNic(gpu=device.name, label="PIX", path=PathClass.PIX, nics=tuple(mine), local=True,
                               decidable=True))  # fmt: skip
    islands = tuple(
        Island(gpus=tuple(f"GPU{i}" for i in range(start, start + row.island)), all_to_all=True,
               nvlinks_per_pair=(f"NV{row.nvlinks}",))
        for start in range(0, row.gpus, row.island)
    ) if row.nvlinks else ()  # fmt: skip
    node = NodeTopology(
        hostname=hostname or row.name,
        gpus=gpus,
        nics=nics,
        pairs=tuple(pairs),
        islands=islands,
        nearest_nic=tuple(near) if row.nics else (),
        cpu_count=row.cpus,
        numa_nodes=2,
        sku=row.name,
        source=f"catalogue: {row.source}",
    )
    return with_reach(replace(node, expectations=node_expectations(node)))


def cluster(name: str, nodes: int = 1, *, gpus_per_node: int | None = None) -> ClusterTopology:
    """`nodes` equal machines of the catalogue, of which a job uses `gpus_per_node` GPUs each; by default all.

    Raises MachineError for an unknown machine, ValueError for more GPUs than it has.
    """
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= 65536:
        raise MachineError(f"nodes={nodes!r}: must be a whole number from 1 to 65536")
    row = machine(name)
    node = get(name) if gpus_per_node is None else with_gpus(get(name), gpus_per_node)
    near = {nic for nearest in node.nearest_nic for nic in nearest.nics}
    transport = {"efa": "efa", "hca": "rdma", "ethernet": "tcp"}[row.nic_kind]
    if row.nvlink_nodes >= nodes > 1:
        transport = "nvlink"
    return ClusterTopology(
        nodes=(node,) * nodes,
        inter_node_bytes_per_second=len(near) * row.nic_gbps * GIGA / 8.0 if nodes > 1 else None,
        inter_node_transport=transport if nodes > 1 else None,
    )
