"""Settings that belong to debugging, or that do nothing here: what each really does.

Specification: NCCL docs/userguide/source/env.rst, section Debugging; aws-ofi-nccl (what the plugin sets by itself);
AWS EFA cheat sheet (awsome-distributed-training); PyTorch docs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from planner.lint.finding import finding
from planner.lint.values import LEVEL_NAMES, LEVELS, strtoll
from planner.nccl_env.names import NcclName, Version, version_text
from planner.nccl_env.situation import NodeView
from probes.api import Finding, Severity

LEFTOVER_CODES = (
    "env.debug.leftover",
    "env.gid.needless",
    "env.efa.needless",
    "env.torch.allocator",
    "env.torch.debug",
    "env.torch.hang",
    "env.torch.renamed",
)

# What aws-ofi-nccl sets in the process itself, and NCCL then prints as "set by environment".
PLUGIN_VALUES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "NCCL_BUFFSIZE": ("8388608",),
        "NCCL_P2P_NET_CHUNKSIZE": ("524288",),
        "NCCL_NVLSTREE_MAX_CHUNKSIZE": ("524288",),
        "NCCL_NVLS_CHUNKSIZE": ("524288",),
        "NCCL_NET_FORCE_FLUSH": ("0",),
        "NCCL_NETDEVS_POLICY": ("max:1", "MAX:1"),
    }
)

_EFFECTS: Mapping[str, str] = MappingProxyType(
    {
        "NCCL_P2P_DISABLE": "GPUs of one node no longer reach each other directly: data goes through host memory",
        "NCCL_P2P_LEVEL": "it overrides NCCL's own limit for direct access between GPUs",
        "NCCL_SHM_DISABLE": "GPUs without peer access talk through the network even inside one node",
        "NCCL_IB_DISABLE": "NCCL leaves RDMA and sends everything over TCP",
        "NCCL_NET_GDR_LEVEL": "it overrides how near GPU and NIC must be for GPUDirect RDMA; LOC turns it off",
        "NCCL_NET_GDR_READ": "it overrides whether the NIC reads GPU memory when sending; on since Ampere by itself",
        "NCCL_ALGO": "the tuner no longer chooses by size; every size and every later version is held to this choice",
        "NCCL_PROTO": "the tuner no longer chooses by size; LL128 where it is not supported corrupts data",
        "NCCL_BUFFSIZE": "larger buffers cost GPU memory per channel and peer, smaller ones bandwidth",
        "NCCL_NTHREADS": "it fixes the CUDA threads per block that NCCL chooses by GPU",
        "NCCL_MIN_NCHANNELS": "more channels take SMs from the computation; deprecated since 2.17 for NCCL_MIN_CTAS",
        "NCCL_MAX_NCHANNELS": "fewer channels cap the bandwidth; deprecated since 2.17 for NCCL_MAX_CTAS",
        "NCCL_MIN_CTAS": "more blocks take SMs from the computation",
        "NCCL_MAX_CTAS": "fewer blocks cap the bandwidth",
        "NCCL_NVLS_ENABLE": "0 gives up NVLink SHARP; 1 and 2 use it where it is supported",
        "NCCL_MNNVL_ENABLE": "0 gives up NVLink across hosts; 1 makes a missing IMEX an error",
        "NCCL_CUMEM_ENABLE": "0 gives up NVLS and buffer registration, which need cuMem",
        "NCCL_CUMEM_HOST_ENABLE": "it overrides how host memory is allocated; 0 works around /dev/shm or NUMA trouble",
        "NCCL_DMABUF_ENABLE": "0 leaves only nvidia_peermem for GPUDirect RDMA",
        "NCCL_PXN_DISABLE": "1 gives up NVLink to the GPU beside the NIC: all-to-all traffic then crosses rails",
        "NCCL_IB_QPS_PER_CONNECTION": "more queue pairs help only where ECMP hashes flows unevenly",
        "NCCL_IB_PCI_RELAXED_ORDERING": "automatic (2) is right; 1 insists on it, 0 costs bandwidth on most hosts",
        "NCCL_IB_ADAPTIVE_ROUTING": "it overrides what NCCL knows of InfiniBand (on) and RoCE (off)",
        "NCCL_RUNTIME_CONNECT": "0 connects everything at start: slower start, more memory, the same speed",
        "NCCL_LAUNCH_MODE": "it overrides how kernels are launched; GROUP is deprecated",
        "NCCL_GRAPH_REGISTER": "0 gives up zero-copy buffers in CUDA graphs",
        "NCCL_NET_SHARED_BUFFERS": "0 multiplies the memory of send and receive",
        "NCCL_CHECK_POINTERS": "1 checks every pointer of every call",
        "NCCL_RAS_ENABLE": "0 turns off the thread that answers ncclras",
    }
)
_DEFAULT_EFFECT = "it overrides what NCCL works out by itself"

_EFA_NEEDLESS: Mapping[str, str] = MappingProxyType(
    {
        "NCCL_PROTO": "only aws-ofi-nccl up to 1.5 needed it; it now costs latency of small messages",
        "FI_PROVIDER": "the plugin asks for efa by itself since 1.5",
        "FI_EFA_USE_DEVICE_RDMA": "needless since libfabric 1.18 with aws-ofi-nccl 1.7, harmless on p4 and p5",
        "FI_EFA_ENABLE_SHM_TRANSFER": "no effect on NCCL, which has its own shared memory transport",
        "FI_EFA_FORK_SAFE": "the plugin sets it by itself",
        "RDMAV_FORK_SAFE": "it slows memory registration and is not needed with current kernels; do not use it",
        "RDMAV_HUGEPAGES_SAFE": "not needed with current kernels; do not use it",
        "NCCL_SOCKET_NTHREADS": "it tunes the TCP transport, which EFA does not use",
        "NCCL_NSOCKS_PERTHREAD": "it tunes the TCP transport, which EFA does not use",
    }
)


_EFA_ONLY_THIS: Mapping[str, str] = MappingProxyType({"FI_PROVIDER": "efa", "NCCL_PROTO": "simple"})


def check_leftover(
    name: str, value: str, entry: NcclName, version: Version | None, node: NodeView, *, plugin: bool
) -> Iterator[Finding]:
    """A setting of the Debugging section that stayed. `plugin`: aws-ofi-nccl is in use and may have set it itself."""
    if plugin and (value in PLUGIN_VALUES.get(name, ()) or name in ("NCCL_TUNER_PLUGIN", "NCCL_TOPO_FILE")):
        return
    if name == "NCCL_IB_GID_INDEX" and version is not None and version >= (2, 21, 0):
        if strtoll(value)[0] < 0:
            return
        yield finding(
            "env.gid.needless", Severity.INFO, name, value,
            (
                f"NCCL {version_text(version)} takes this index on every port without looking; left "
                "unset it finds the RoCE v2 GID itself, also where the tables of two hosts differ."
            ),
            f"Unset {name}.",
        )  # fmt: skip
        return
    if entry.doc_class != "debugging" or not _acts(name, value, entry):
        return
    if name == "NCCL_PXN_DISABLE" and _without_nvlink(node):
        yield finding(
            "env.debug.leftover", Severity.INFO, name, value,
            "A debugging setting that stayed and does nothing here: PXN sends through a GPU that NVLink joins to the "
            "sender, and no two GPUs of this host are joined so.",
            f"Unset {name}: on a host with NVLink it costs bandwidth.",
            ("NCCL src/graph/paths.cc: PXN is PCIe and NVLink",),
        )  # fmt: skip
        return
    severity = Severity.WARN if name in _COSTLY and _turns_off(name, value) else Severity.INFO
    yield finding(
        "env.debug.leftover", severity, name, value,
        f"A debugging setting that stayed: {_EFFECTS.get(name, _DEFAULT_EFFECT)}.",
        f"Unset {name}, unless a measurement on this machine speaks for it.",
        ("NCCL docs/userguide/source/env.rst: section Debugging",),
    )  # fmt: skip


# Those that switch a transport or an algorithm off as a whole.
_COSTLY = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_PXN_DISABLE")


def _without_nvlink(node: NodeView) -> bool:
    """Whether it is known that no NVLink joins two GPUs."""
    known = node.topology is not None and bool(node.topology.gpus) and node.topology.nvlink_known
    return known and not any(len(island.gpus) > 1 for island in node.topology.islands)  # type: ignore[union-attr]


def _turns_off(name: str, value: str) -> bool:
    return name in ("NCCL_ALGO", "NCCL_PROTO") or strtoll(value)[0] != 0


def _acts(name: str, value: str, entry: NcclName) -> bool:
    """False where the value is the default or is ignored: there is nothing left over."""
    if not value:
        return False
    if name == "NCCL_P2P_DISABLE":
        return strtoll(value)[0] == 1
    if name in LEVELS:
        return value in LEVEL_NAMES or value[0].isdigit()
    number, whole = strtoll(value)
    return not (whole and entry.default == str(number)) and (whole or not entry.default.lstrip("-").isdigit())


def check_efa(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Settings that do nothing, or harm, where EFA carries the traffic."""
    for name, why in _EFA_NEEDLESS.items():
        value = environment.get(name)
        if value is None or value.lower() != _EFA_ONLY_THIS.get(name, value.lower()):
            continue
        yield finding(
            "env.efa.needless", Severity.INFO, name, value,
            f"{why}.", f"Unset {name}.",
        )  # fmt: skip


def check_torch(environment: Mapping[str, str]) -> Iterator[Finding]:
    """PyTorch's and CUDA's own debugging switches, and its renamed variables."""
    for name, acts, effect in (
        ("CUDA_LAUNCH_BLOCKING", _true, "every kernel launch waits for the one before: nothing overlaps"),
        ("TORCH_NCCL_BLOCKING_WAIT", _true, "the host waits for every collective: nothing overlaps"),
        ("TORCH_NCCL_NAN_CHECK", _true, "every collective's input is searched for NaN"),
        ("TORCH_DISTRIBUTED_DEBUG", _detail, "every collective is checked against all ranks first"),
    ):
        value = environment.get(name, "")
        if acts(value):
            yield finding(
                "env.torch.debug", Severity.WARN, name, value,
                f"{effect}.", f"Unset {name} for training.",
            )  # fmt: skip

    dead = "collectives that fail or time out end no process: a rank that dies leaves the others waiting for ever"
    for name, off, severity in (
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", dead, Severity.WARN),
        ("NCCL_ASYNC_ERROR_HANDLING", dead, Severity.WARN),
        ("TORCH_NCCL_ENABLE_MONITORING", "where PyTorch's watchdog itself hangs, nothing ends the job", Severity.INFO),
    ):
        value = environment.get(name, "")
        if value.strip().lower() in ("0", "false", "no", "n", "f", "off"):
            yield finding(
                "env.torch.hang", severity, name, value,
                f"{off}.",
                f"Unset {name}: the default ends the job.",
            )  # fmt: skip


def check_allocator(environment: Mapping[str, str]) -> Iterator[Finding]:
    """PyTorch's allocator takes exactly True or False (c10 ConfigTokenizer) and ends the job at anything else."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = environment.get(name, "")
        options = dict(option.partition(":")[::2] for option in value.split(","))
        segments = options.get("expandable_segments")
        if segments is not None and segments.strip() not in ("True", "False"):
            yield finding(
                "env.torch.allocator", Severity.FAIL, name, value,
                "PyTorch expects exactly True or False and ends with an error.",
                f"Write {name}=expandable_segments:True.",
            )  # fmt: skip


def _true(value: str) -> bool:
    return value.lower() in ("1", "y", "yes", "t", "true", "on")


def _detail(value: str) -> bool:
    return value.upper() == "DETAIL"


def check_renamed(name: str, value: str, entry: NcclName) -> Iterator[Finding]:
    """Names PyTorch reads under an old spelling; libnccl never reads them."""
    if "deprecated alias of " not in entry.reader:
        return
    right = entry.reader.split("deprecated alias of ")[1].rstrip(")")
    yield finding(
        "env.torch.renamed", Severity.INFO, name, value,
        f"PyTorch reads it, not NCCL, and only as the old name of {right}.",
        f"Write {right}={value}.",
    )  # fmt: skip
