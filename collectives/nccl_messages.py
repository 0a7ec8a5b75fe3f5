"""INFO messages of NCCL and RCCL that state a fact: version, network, devices, nodes, variables, GPUDirect RDMA.

Surface: NCCL src/init.cc, src/plugin/net.cc, src/transport/net_ib*, src/transport/net_socket.cc, src/graph/paths.cc,
src/misc/param.cc, versions 2.4 to 2.31; RCCL; aws-ofi-nccl. "Connected all rings, ... GDR 1" is left out on purpose:
1 is its initial value.
"""

from __future__ import annotations

import re
from collections import Counter

MAX_VALUES = 512

# The literal macro names are what TensorFlow's build of NCCL prints.
_BUILD = rb"(?:\+(?:(?:cuda|hip|rocm)[\d.]*\d|cudaCUDA_MAJOR\.CUDA_MINOR))?"
_VERSION = re.compile(rb"\bNCCL version (?:: )?v?(\d+\.\d+(?:\.\d+)?(?:[a-z]+\d*)?(?:-\d+)?" + _BUILD + rb")")
_RCCL_VERSION = re.compile(rb"RCCL version ?:? ?v?(\d+\.\d+(?:\.\d+)?" + _BUILD + rb")")
_VLLM_VERSION = re.compile(rb"vLLM is using nccl==(\d+\.\d+\.\d+)")
# What may stand behind a message: the wrapping of a log collector, a table, a page, or Ray's count of repetitions.
_END = rb"(?=\s*(?:$|[\"'`|<\\]|\[repeated ))"
_NETWORK = re.compile(rb"Using (?:internal N|n)etwork ([A-Za-z][\w .+-]{0,40}?)" + _END)
_ASSIGNED = re.compile(rb"Assigned NET plugin ([A-Za-z][\w .+-]{0,40}?) to comm")
_NODES = re.compile(rb"nRanks (\d{1,7}) nNodes (\d{1,6}) localRanks (\d{1,5})")
_RANKS = re.compile(rb"rank \d+ n[rR]anks (\d{1,7})\b")
_ENVIRONMENT = re.compile(
    rb"\b([A-Z][A-Z0-9]*_[A-Z0-9_]{1,60}) set (?:by environment )?to ([^\s\"\\|<`][^\"\\|<`]*?)\.?" + _END
)
_IB_USING = re.compile(rb"NET/\w+ : Using(.*?)(?:; ?OOB ([^\s:]+):|$)")
_PORT = re.compile(
    rb"(?:\[(\d{1,4})\])?[={ ]*\[?\d{0,4}\]? ?([A-Za-z][\w.+-]*:\d+[\w:.]*)/(IB|RoCE|Ethernet|Eth|iWARP)\b"
)
_SOCKETS = re.compile(rb"\[\d+\]([^\s:\[\]]+):")
_GDR_HCA = re.compile(rb"NET/([\w ]+?) ?: GPU Direct RDMA (Enabled|Disabled) for HCA (\d+) '?([^\s']*)")
_GDR_HCA_24 = re.compile(rb"GPU Direct RDMA (Disabled) for HCA (\d+)")
_GDR_PATH = re.compile(rb"GPU Direct RDMA (Enabled|Disabled) for .*?\(distance (\d+) (?:<=|>=|>|<) (\d+)\)")
_BOOTSTRAP = re.compile(rb"(?:Bootstrap ?|^NET ): Using (?:interface |\[0\])?([^\s:\[\]]+):")
_PROVIDER = re.compile(rb"Selected [Pp]rovider is ([\w;-]+)")
_MNNVL = re.compile(rb"MNNVL 1 cliqueId|localRank \d+ MNNVL 1\b")


# nccl-tests' own list: "#  Rank  0 Group  0 Pid   4068 on   node-1 device  0 [0x0f] NVIDIA H100".
_TEST_RANK = re.compile(rb"Rank +(\d{1,6}) +(?:Group +\d+ +)?Pid +\d+ on +(\S{1,128}) device ")


class Facts:
    """Facts stated by messages, bounded."""

    def __init__(self) -> None:
        self.versions: Counter[str] = Counter()
        self.rccl_version: str | None = None
        self.networks: Counter[str] = Counter()
        self.assigned: Counter[str] = Counter()
        self.ranks = 0
        self.nodes = 0
        self.local_ranks = 0
        self.environment: dict[str, str] = {}
        self.variable = ""  # that the message in hand told, empty where none
        self.ports: dict[bytes, dict[str, str]] = {}  # host: port: link layer
        self.whole_lists: set[bytes] = set()  # hosts of which a list was read to its end
        self.port_of_index: dict[int, set[str]] = {}  # device number: link layers
        self.no_ib_device = 0
        self.ib_listed = 0
        self.sockets: dict[str, None] = {}
        self.bootstrap: dict[str, None] = {}
        self.gdr_hca: Counter[tuple[str, bool]] = Counter()  # (network, enabled)
        self.gdr_paths: Counter[tuple[bool, int, int]] = Counter()  # (enabled, distance, limit)
        self.provider: str | None = None
        self.nvls: bool | None = None
        self.mnnvl = False
        self.test_ranks: dict[int, bytes] = {}  # rank of nccl-tests: host

    @property
    def test_on_one_host(self) -> bool:
        """Whether nccl-tests lists every rank, all on one host."""
        count = len(self.test_ranks)
        whole = count > 0 and max(self.test_ranks) + 1 == count and self.ranks in (0, count)
        return whole and len(set(self.test_ranks.values())) == 1

    def take(self, message: bytes, host: bytes) -> list[str]:
        """Facts that the message states, in words; an empty list if none."""
        said: list[str] = []
        self.variable = ""
        if b"CCL version" in message or b"nccl==" in message:
            self._version(message, said)
        if b" Pid " in message and (match := _TEST_RANK.search(message)) and len(self.test_ranks) < MAX_VALUES * 8:
            self.test_ranks[int(match[1])] = match[2]
        if b" set " in message:
            self._environment(message)
        if b"NET" in message or b"etwork " in message:
            self._network(message, host, said)
        if (
            (b"Bootstrap" in message or message.startswith(b"NET : "))
            and (match := _BOOTSTRAP.search(message))
            and len(self.bootstrap) < 64
        ):
            self.bootstrap[match[1].decode("utf-8", "replace")] = None
            said.append("interface of the bootstrap")
        if b"anks " in message:
            self._ranks(message, said)
        if b"GPU Direct RDMA" in message:
            self._gdr(message, said)
        if b"NVLS multicast support is " in message:
            self.nvls = (self.nvls or False) or b" is available" in message
        if b"MNNVL 1" in message and _MNNVL.search(message):
            self.mnnvl = True
        return said

    def take_wrapped(self, message: bytes, host: bytes) -> None:
        """A message joined with the line after it: only what cannot be told from half of it."""
        if _NODES.search(message):
            self._ranks(message, [])
        elif b"NET/" in message and (match := _IB_USING.search(message)) and _PORT.search(match[1]):
            self._ports(match, host)
        elif (match := _VERSION.search(message)) and b"+" in match[1]:
            self.versions[match[1].decode()] += 1

    def _version(self, message: bytes, said: list[str]) -> None:
        if match := _RCCL_VERSION.search(message):
            self.rccl_version = self.rccl_version or match[1].decode()
            said.append("RCCL version")
        elif (match := _VERSION.search(message) or _VLLM_VERSION.search(message)) and len(self.versions) < 64:
            self.versions[match[1].decode()] += 1
            said.append("NCCL version")

    def _environment(self, message: bytes) -> None:
        match = _ENVIRONMENT.search(message)
        if match and (match[1].decode() in self.environment or len(self.environment) < MAX_VALUES):
            self.variable = match[1].decode()
            self.environment[self.variable] = match[2][:200].decode("utf-8", "replace")

    def _network(self, message: bytes, host: bytes, said: list[str]) -> None:
        if match := _NETWORK.search(message):
            name = match[1].decode()
            if name in self.networks or len(self.networks) < 64:
                self.networks[name] += 1
                said.append(f"network {name} selected")
        elif (match := _ASSIGNED.search(message)) and len(self.assigned) < 64:
            self.assigned[match[1].decode()] += 1
        elif b"NET/IB : No device found" in message:
            self.no_ib_device += 1
            said.append("no RDMA device")
        elif b"NET/Socket : Using" in message:
            for name in _SOCKETS.findall(message[:2000]):
                if len(self.sockets) < 64:
                    self.sockets[name.decode("utf-8", "replace")] = None
            said.append("socket interfaces")
        elif (match := _IB_USING.search(message)) and _PORT.search(match[1]):
            self._ports(match, host)
            said.append("RDMA devices in use")
        elif match := _PROVIDER.search(message):
            self.provider = match[1].decode()
            said.append(f"libfabric provider {self.provider}")

    def _ports(self, match: re.Match[bytes], host: bytes) -> None:
        self.ib_listed += 1
        if host not in self.ports and len(self.ports) >= MAX_VALUES * 8:
            return
        row = self.ports.setdefault(host, {})
        if match[2]:
            self.whole_lists.add(host)
        position = -1
        for index, port, layer in _PORT.findall(match[1]):
            position = int(index) if index else position + 1
            kind = "IB" if layer == b"IB" else "RoCE"
            if len(row) < 128:
                row[port.decode()] = kind
                self.port_of_index.setdefault(position, set()).add(kind)

    def _ranks(self, message: bytes, said: list[str]) -> None:
        if match := _NODES.search(message):
            self.ranks = max(self.ranks, int(match[1]))
            self.nodes = max(self.nodes, int(match[2]))
            self.local_ranks = max(self.local_ranks, int(match[3]))
            said.append("nodes of the communicator")
        elif match := _RANKS.search(message):
            self.ranks = max(self.ranks, int(match[1]))

    def _gdr(self, message: bytes, said: list[str]) -> None:
        if match := _GDR_HCA.search(message):
            enabled = match[2] == b"Enabled"
            if len(self.gdr_hca) < 64:
                self.gdr_hca[(match[1].decode(), enabled)] += 1
            said.append(f"GPUDirect RDMA {'possible on' if enabled else 'refused by'} a device")
        elif match := _GDR_PATH.search(message):
            key = (match[1] == b"Enabled", int(match[2][:4]), int(match[3][:4]))
            if key in self.gdr_paths or len(self.gdr_paths) < 64:
                self.gdr_paths[key] += 1
            if not key[0]:
                said.append("GPUDirect RDMA too far")
        elif _GDR_HCA_24.search(message):
            self.gdr_hca[("IB", False)] += 1
            said.append("GPUDirect RDMA refused by a device")
