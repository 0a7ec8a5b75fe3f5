"""NVML's answers for GPUs that are described in a few lines.

Specification: NVML API reference. Board figures are of the vendor's data sheets; what a board does not support answers
NOT_SUPPORTED, as the driver does.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from probes.host.nvml import HANDLE, XIDS, failure
from probes.host.protocol import GpuHandle, Json, NvmlError

GIB, MIB = 1 << 30, 1 << 20
NONE = "NOT_SUPPORTED"


@dataclass(frozen=True, kw_only=True)
class Board:
    """What all GPUs of one product have in common."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    links: int = 0  # NVLinks of the board; 0 answers NOT_SUPPORTED
    link_version: int = 0  # as nvmlDeviceGetNvLinkVersion answers
    generation: int = 4
    bar1_bytes: int = 64 * GIB
    power_watts: int = 300
    clock_mhz: int = 1980
    slowdown_celsius: int = 92
    remaps: bool = True  # Ampere and later; before, pages are retired


PARTS: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(Path(__file__).with_name("parts.yaml").read_text("utf-8"))
BOARDS = {
    name: Board(**{"memory_bytes": row.pop("memory_mib") * MIB, **row, "capability": tuple(row["capability"])})
    for name, row in PARTS["boards"].items()
}
H100, A100_40, A40, L40S, TITAN_RTX, GB200 = (
    BOARDS[name] for name in ("H100", "A100_40", "A40", "L40S", "TITAN_RTX", "GB200")
)


@dataclass(kw_only=True)
class NvmlGpu:
    """One GPU: its board, its place, and whatever differs."""

    board: Board
    bus_id: str
    numa: int
    peers: dict[int, int] = field(default_factory=dict)  # GPU -> NVLinks to it
    switches: tuple[str, ...] = ()  # bus ids the links go to in turn; "" is hidden
    links_down: tuple[int, ...] = ()
    answers: dict[str, Any] = field(default_factory=dict)  # symbol (and arguments) -> answer or error name


class NvmlAnswers:
    """Answers `Host.nvml` from a list of GPUs."""

    def __init__(self, gpus: list[NvmlGpu], affinity: dict[int, list[int]], driver: str, cuda: int) -> None:
        self.gpus, self.affinity = gpus, affinity
        self.system: dict[str, Any] = {
            "nvmlDeviceGetCount": len(gpus),
            "nvmlSystemGetDriverVersion": driver,
            "nvmlSystemGetCudaDriverVersion_v2": cuda,
        }

    def __call__(self, symbol: str, *arguments: GpuHandle | int | str) -> Json:
        """One call, as `Host.nvml`."""
        if not arguments:
            if symbol not in self.system:
                raise failure(symbol, NONE)
            return self.system[symbol]
        first = arguments[0]
        if symbol == XIDS:
            watched = [index for index, gpu in enumerate(self.gpus) if "*" not in gpu.answers]
            return {"watched": watched, "xids": []}
        assert isinstance(first, GpuHandle)
        gpu = self.gpus[first.index]
        lost = gpu.answers.get("*")
        if lost:
            raise failure(HANDLE, lost)
        answer = self._answer(gpu, first.index, symbol, arguments[1:])
        if isinstance(answer, str) and answer in (NONE, "INVALID_ARGUMENT", "GPU_IS_LOST"):
            raise failure(symbol, answer)
        if isinstance(answer, NvmlError):
            raise answer
        return answer

    def _answer(self, gpu: NvmlGpu, index: int, symbol: str, arguments: tuple[Any, ...]) -> Any:
        key = ",".join([symbol, *(str(a.index if isinstance(a, GpuHandle) else a) for a in arguments)])
        for name in (key, symbol):
            if name in gpu.answers:
                return gpu.answers[name]
        if symbol in ("nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetP2PStatus"):
            return self._pair(gpu, index, symbol, arguments)
        if "NvLink" in symbol:
            return _nvlink(self._links(gpu, index), gpu, symbol, arguments)
        if symbol == "nvmlDeviceGetCpuAffinity":
            return self._mask(gpu.numa, arguments[0])
        if symbol == "nvmlDeviceGetFieldValues":
            return _fields(gpu, arguments)
        usual = {**PARTS["answers"]["every"], **PARTS["answers"]["remaps" if gpu.board.remaps else "retires"]}
        if symbol in usual:
            return copy.deepcopy(usual[symbol])
        return _SIMPLE[symbol](gpu, index) if symbol in _SIMPLE else NONE

    def _mask(self, numa: int, words: int) -> list[int]:
        mask = [0] * words
        for cpu in self.affinity.get(numa, []):
            mask[cpu // 64] |= 1 << cpu % 64
        return mask

    def _links(self, gpu: NvmlGpu, index: int) -> list[tuple[int, str]]:
        """(remote kind, remote bus id) by link."""
        if gpu.switches:
            return [(2, gpu.switches[i % len(gpu.switches)]) for i in range(gpu.board.links)]
        return [(0, self.gpus[peer].bus_id) for peer, count in sorted(gpu.peers.items()) for _ in range(count)]

    def _pair(self, gpu: NvmlGpu, index: int, symbol: str, arguments: tuple[Any, ...]) -> Any:
        other = arguments[0].index
        if symbol == "nvmlDeviceGetTopologyCommonAncestor":
            near = gpu.answers.get("ancestors", {})
            return near.get(other, 40 if gpu.numa == self.gpus[other].numa else 50)
        if arguments[1] == 2:  # NVLink
            linked = bool(gpu.switches) or other in gpu.peers
            return 0 if linked else 5
        return gpu.answers.get("p2p", 0)


def _nvlink(links: list[tuple[int, str]], gpu: NvmlGpu, symbol: str, arguments: tuple[Any, ...]) -> Any:
    link = arguments[0]
    if not gpu.board.links:
        return NONE
    if link >= gpu.board.links:
        return "INVALID_ARGUMENT"
    active = link < len(links) and link not in gpu.links_down
    if symbol == "nvmlDeviceGetNvLinkState":
        return int(active)
    if not active:
        return NONE
    kind, bus_id = links[link]
    if symbol == "nvmlDeviceGetNvLinkVersion":
        return gpu.board.link_version
    if symbol == "nvmlDeviceGetNvLinkRemoteDeviceType":
        return kind if bus_id else 0xFF
    if symbol == "nvmlDeviceGetNvLinkErrorCounter":
        return NONE if gpu.board.capability >= (10, 0) else 0
    return pci_info(bus_id)


def pci_info(bus_id: str) -> dict[str, Any]:
    """Of nvmlPciInfo_t the bus id; an empty one is hidden by a hypervisor or a rack."""
    return {"busId": f"0000{bus_id.upper()}" if bus_id else "FFFFFFFF:FF:FF.0"}


def _fields(gpu: NvmlGpu, wanted: tuple[int | str, ...]) -> list[Json]:
    """C2C link count on Grace, NVLink errors and the recovery action on Hopper and later; no other field."""
    major = gpu.board.capability[0]
    known = {170: gpu.answers.get("c2c"), 230: 0 if major >= 9 else None, 91: gpu.board.links or None}
    if major >= 9:
        known |= dict.fromkeys((161, 162, 163) if major == 9 else (208, 214, 219, 221), 0)
    return [known.get(int(str(item).partition(":")[0])) for item in wanted]


_Answer = Callable[[NvmlGpu, int], Any]
_SIMPLE: dict[str, _Answer] = {
    "nvmlDeviceGetPciInfo": lambda g, i: pci_info(g.bus_id),
    "nvmlDeviceGetUUID": lambda g, i: f"GPU-{i:08x}-0000-4000-8000-{int(g.bus_id[5:7], 16):012x}",
    "nvmlDeviceGetName": lambda g, i: g.board.name,
    "nvmlDeviceGetMemoryInfo": lambda g, i: {
        "total": g.board.memory_bytes, "free": g.board.memory_bytes - 600 * MIB, "used": 600 * MIB,
    },
    "nvmlDeviceGetCudaComputeCapability": lambda g, i: list(g.board.capability),
    "nvmlDeviceGetMemoryAffinity": lambda g, i: [1 << g.numa] if g.numa >= 0 else NONE,
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda g, i: g.board.generation,
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda g, i: g.board.generation,
    "nvmlDeviceGetBAR1MemoryInfo": lambda g, i: {
        "bar1Total": g.board.bar1_bytes, "bar1Free": g.board.bar1_bytes - MIB, "bar1Used": MIB,
    },
    "nvmlDeviceGetMigMode": lambda g, i: [0, 0] if g.board.name.split("-")[0][7:] in _MIG else NONE,
    "nvmlDeviceGetC2cModeInfoV": lambda g, i: {"isC2cEnabled": 1} if "c2c" in g.answers else NONE,
    "nvmlDeviceGetTemperature": lambda g, i: 36 + i % 4,
    "nvmlDeviceGetTemperatureThreshold": lambda g, i: g.board.slowdown_celsius,
    "nvmlDeviceGetPowerUsage": lambda g, i: g.board.power_watts * 150,
    "nvmlDeviceGetEnforcedPowerLimit": lambda g, i: g.board.power_watts * 1000,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda g, i: g.board.power_watts * 1000,
    "nvmlDeviceGetMaxClockInfo": lambda g, i: g.board.clock_mhz,
}  # fmt: skip
_MIG = ("H100 80GB HBM3", "A100", "GB200")


def fabric(state: int, cluster: bytes = bytes(16), clique: int = 0) -> dict[str, Any]:
    """nvmlGpuFabricInfo of version 2, healthy."""
    return {
        "version": 0x2000024, "clusterUuid": list(cluster), "status": 0, "cliqueId": clique, "state": state,
        "healthMask": 2,
    }  # fmt: skip
