"""INFO messages of NCCL and RCCL that state a fact: version, network, devices, nodes, variables, GPUDirect RDMA.

Surface: NCCL src/init.cc, src/plugin/net.cc, src/transport/net_ib*, src/transport/net_socket.cc, src/graph/paths.cc,
src/misc/param.cc, versions 2.4 to 2.32; RCCL; aws-ofi-nccl. "Connected all rings, ... GDR 1" is left out on purpose:
1 is its initial value.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from functools import cache
from typing import TypeVar

from contracts.tables import read_patterns
from hardware.gpus import is_of, pattern

MAX_VALUES = 512
MAX_PLACES = 4_096

FABRIC = "fabric: "  # start of the facts that tell how NCCL uses NVSwitch; in no proof of a transport
END = "the end of the job"
_TEXTS = read_patterns(__file__, "facts.toml", "facts", str.encode)
_SPARK_PORT = re.compile(r"roce(?:P2)?p1s0f[01]")
_Name = TypeVar("_Name")
_Value = TypeVar("_Value")


def _fill(mine: dict[_Name, _Value], theirs: dict[_Name, _Value], most: int) -> None:
    """Add what is not known yet, up to so many entries."""
    for name, value in theirs.items():
        if len(mine) < most:
            mine.setdefault(name, value)


@cache
def _gpu_name() -> re.Pattern[bytes]:
    """Names of GPUs as the driver prints them ("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB", "NVIDIA GB10")."""
    return re.compile(
        rb"(?:NVIDIA[ -]|Tesla[ -]|(?<![A-Za-z])(?=GeForce|Quadro))(%s\b[\w -]{0,40})" % pattern("model").encode()
    )


def gpus_before_ampere(names: Iterable[str]) -> bool | None:
    """Whether the GPUs of these names send without GPUDirect RDMA by default; None where the names do not tell.

    Below compute capability 8.0 NCCL does so unless NVLink joins the GPU to another (ncclTopoCheckGdr,
    src/graph/paths.cc).
    """
    kinds = {
        None if not (is_of("Ampere or later", name) or is_of("before Ampere", name))
        else not is_of("Ampere or later", name) and not is_of("NVLink board", name)
        for name in names
    }  # fmt: skip
    if False in kinds:
        return False
    return True if kinds == {True} else None


def gpus_are(kind: str, names: Collection[str]) -> bool:
    """Whether all these GPUs are of a kind: of cards NVLink joins some in pairs, and most not at all."""
    return all(is_of(kind, name) for name in names) and bool(names)


class Facts:
    """Facts stated by messages, bounded."""

    def __init__(self) -> None:
        self.versions: Counter[str] = Counter()
        self.rccl_version: str | None = None
        self.rccl = False  # a line as only RCCL prints it
        self.networks: Counter[str] = Counter()
        self.assigned: Counter[str] = Counter()
        self.ranks = 0
        self.nodes = 0
        self.local_ranks = 0
        self.environment: dict[str, str] = {}
        self.variable = ""  # named by the current message, empty if none
        self.ports: dict[bytes, dict[str, str]] = {}  # host: port: link layer
        self.whole_lists: set[bytes] = set()  # hosts of which a list was read to its end
        self.port_of_index: dict[int, set[str]] = {}  # device number: link layers
        self.no_ib_device = 0
        self.ib_listed = 0
        self.sockets: dict[str, None] = {}
        self.bootstrap: dict[str, None] = {}
        self.gdr_hca: Counter[tuple[str, bool]] = Counter()  # (network, enabled)
        # By host, what its lines say of GPUDirect RDMA: "usable", "refused", "near", "far" (GPU and NIC).
        self.gdr_words: dict[str, set[str]] = {}
        self.gdr_paths: Counter[tuple[bool, int, int]] = Counter()  # (enabled, distance, limit)
        self.gdr_read_allowed = False  # a path that GPUDirect RDMA may be used on for sends
        self.providers: Counter[str] = Counter()  # of libfabric
        self.nvls: bool | None = None
        self.nvls_made = 0  # communicators that set it up
        self.mnnvl: bool | None = None  # of a communicator
        self.mnnvl_fabric = False  # a GPU tells of a fabric that reaches over nodes
        self.mnnvl_clique = 0
        self.nvlink = False  # the best graph found joins GPUs by it: "type NVL/PIX"
        self.gpus: Counter[str] = Counter()  # names
        self.finished = 0  # lines that say that the job, or the test, finished
        self.rank_places: dict[int, tuple[bytes, bytes]] = {}  # of the largest communicator: rank: (host, GPU)
        self.places_of = 0  # its size
        self._places: set[bytes] = set()
        self.test_ranks: dict[int, bytes] = {}  # rank of nccl-tests: host

    @property
    def provider(self) -> str | None:
        """The provider of libfabric that most processes chose."""
        return max(self.providers, key=lambda name: self.providers[name]) if self.providers else None

    def add_place(self, place: bytes) -> None:
        """Keep which ranks and devices a channel joins."""
        if len(self._places) < MAX_PLACES:
            self._places.add(place)

    def rank_devices(self) -> set[tuple[int, bytes]]:
        """Ranks and devices, as channel lines show them: "8[0]" (device of NVML, 2.18 on) or "8[1b000]" (bus)."""
        found: set[tuple[int, bytes]] = set()
        for place in self._places:
            if match := _TEXTS["place"].search(place):
                found.update(((int(match[1]), match[2]), (int(match[3]), match[4])))
        return found

    def unread_ranks(self) -> tuple[int, ...]:
        """Ranks of the largest communicator of which no line was read; of a channel's two ends one wrote the line."""
        places = ((b"[receive]" in place, _TEXTS["place"].search(place)) for place in self._places)
        read = {*self.rank_places, *(int(match[3 if receives else 1]) for receives, match in places if match)}
        known = 0 < len(self.rank_places) < MAX_PLACES and 2 * len(self._places) < MAX_PLACES  # else some are left out
        return tuple(rank for rank in range(min(self.ranks, MAX_PLACES)) if rank not in read) if known else ()

    def add_rank(self, rank: int, ranks: int, host: bytes, gpu: bytes) -> None:
        """Keep where a rank of the largest communicator sits."""
        if ranks > self.places_of:
            self.places_of, self.rank_places = ranks, {}
        if ranks == self.places_of and len(self.rank_places) < MAX_PLACES:
            self.rank_places.setdefault(rank, (host, gpu))

    def gpu_names(self) -> tuple[str, ...]:
        """Names of GPUs that the log holds. Without one, DGX Spark is known by where its parts sit."""
        if self.gpus:
            return tuple(sorted(self.gpus))
        # GB10 and its ConnectX-7 have places of their own: PCI domain f for the GPU, two domains for the two ports.
        at_f = any(gpu == b"f01000" for _, gpu in self.rank_places.values())
        ports = {port.split(":")[0] for row in self.ports.values() for port in row}
        return ("GB10",) if at_f and any(_SPARK_PORT.fullmatch(port) for port in ports) else ()

    def all_on_one_host(self) -> bool:
        """Whether every rank of the largest communicator is known, on one host, each with a GPU of its own."""
        whole = self.places_of > 0 and self.places_of >= self.ranks and len(self.rank_places) == self.places_of
        places = self.rank_places.values()
        whole = whole and all(rank < self.places_of for rank, _ in self.rank_devices())
        return whole and len({host for host, _ in places}) == 1 and len(set(places)) == self.places_of

    def merge(self, other: Facts) -> None:
        """Add what a further piece of the same run states."""
        for name in ("versions", "networks", "assigned", "gdr_hca", "gdr_paths", "providers", "gpus"):
            getattr(self, name).update(getattr(other, name))
        for name in ("ranks", "nodes", "local_ranks", "mnnvl_clique"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for name in ("no_ib_device", "ib_listed", "nvls_made", "finished"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("nvls", "mnnvl"):
            if getattr(other, name) is not None:
                setattr(self, name, bool(getattr(self, name)) or getattr(other, name))
        for name, words in other.gdr_words.items():
            self._add_gdr_word(name, *words)
        self.rccl_version = self.rccl_version or other.rccl_version
        for name in ("rccl", "gdr_read_allowed", "mnnvl_fabric", "nvlink"):
            setattr(self, name, getattr(self, name) or getattr(other, name))
        _fill(self.environment, other.environment, MAX_VALUES)
        for host, row in other.ports.items():
            if host in self.ports or len(self.ports) < MAX_VALUES * 8:
                self.ports.setdefault(host, {}).update(row)
        self.whole_lists |= other.whole_lists
        for index, kinds in other.port_of_index.items():
            self.port_of_index.setdefault(index, set()).update(kinds)
        _fill(self.sockets, other.sockets, 64)
        _fill(self.bootstrap, other.bootstrap, 64)
        _fill(self.test_ranks, other.test_ranks, MAX_VALUES * 8)
        for rank, (host, gpu) in other.rank_places.items():
            self.add_rank(rank, other.places_of, host, gpu)
        for place in other._places:
            self.add_place(place)

    @property
    def test_on_one_host(self) -> bool:
        """Whether nccl-tests lists every rank, all on one host."""
        count = len(self.test_ranks)
        whole = count > 0 and max(self.test_ranks) + 1 == count and self.ranks in (0, count)
        whole = whole and all(rank < count for rank, _ in self.rank_devices())
        return whole and len(set(self.test_ranks.values())) == 1

    def take(self, message: bytes, host: bytes) -> list[str]:
        """Facts that the message states, in words; an empty list if none."""
        facts: list[str] = []
        self.variable = ""
        if b"CCL version" in message or b"nccl==" in message:
            self._version(message, facts)
        has_room = len(self.test_ranks) < MAX_VALUES * 8
        if has_room and b" Pid " in message and (match := _TEXTS["test_rank"].search(message)):
            self.test_ranks[int(match[1])] = match[2]
        # libraries of ROCm
        self.rccl |= b"librccl" in message or b"rocm_smi_lib" in message or b"ROCr version" in message
        if b" set " in message:
            self._environment(message)
        if b"NET" in message or b"etwork " in message:
            self._network(message, host, facts)
        if (
            (b"Bootstrap" in message or message.startswith(b"NET : "))
            and (match := _TEXTS["bootstrap"].search(message))
            and len(self.bootstrap) < 64
        ):
            self.bootstrap[match[1].decode("utf-8", "replace")] = None
            facts.append("interface of the bootstrap")
        if b"anks " in message:
            self._ranks(message, facts)
        if b"GPU Direct RDMA" in message:
            self._gdr(message, host.decode("utf-8", "replace"), facts)
        if message.startswith(b"DMA-BUF is available on GPU device"):
            self._add_gdr_word(host.decode("utf-8", "replace"), "usable")
        if b"NVLS" in message or b"MNNVL" in message or b" nvls channels" in message:
            self._nvlink(message, facts)
        if b"type NVL/" in message:
            self.nvlink = True
        if b"NVIDIA" in message or b"Tesla" in message or b"GeForce" in message or b" Pid " in message:
            self._gpus(message, facts)
        if _TEXTS["finished"].search(message):
            self.finished += 1
            facts.append(END)
        return facts

    def _nvlink(self, message: bytes, facts: list[str]) -> None:
        if b"NVLS multicast support is " in message:
            self.nvls = (self.nvls or False) or b" is available" in message
            facts.append(f"{FABRIC}NVLS multicast {'' if b' is available' in message else 'not '}available")
        elif b"NVLS comm 0x" in message or b"Connected NVLS tree" in message:
            self.nvls_made += 1
            facts.append(f"{FABRIC}NVLS in use")
        if match := _TEXTS["nvls_channels"].search(message):
            facts.append(f"{FABRIC}{'no' if match[1] == b'0' else 'some'} NVLS channels")
        if match := _TEXTS["mnnvl"].search(message):
            self.mnnvl = bool(self.mnnvl) or match[1] == b"1"
            if match[1] == b"1":
                facts.append(f"{FABRIC}MNNVL of a communicator")
            elif self.nodes > 1 and _TEXTS["no_mnnvl"].search(message):
                facts.append(f"{FABRIC}MNNVL off")
        if match := _TEXTS["clique"].search(message):
            self.mnnvl_clique = max(self.mnnvl_clique, int(match[1]))
        if _TEXTS["fabric"].search(message):
            self.mnnvl_fabric = True
            facts.append(f"{FABRIC}NVLink reaches over nodes")

    def _gpus(self, message: bytes, facts: list[str]) -> None:
        match = _gpu_name().search(message) or _TEXTS["test_gpu"].search(message)
        if match and len(self.gpus) < 64:
            name = b" ".join(match[1].split()).decode("utf-8", "replace")
            if name not in self.gpus:
                facts.append(f"GPU {name}")
            self.gpus[name] += 1

    def take_wrapped(self, message: bytes, host: bytes) -> None:
        """Read a message that was joined with the next line: only what half of a message does not show."""
        if _TEXTS["nodes"].search(message):
            self._ranks(message, [])
        elif b"NET/" in message and (match := _TEXTS["ib_using"].search(message)) and _TEXTS["port"].search(match[1]):
            self._ports(match, host)
        elif (match := _TEXTS["version"].search(message)) and b"+" in match[1]:
            self.versions[match[1].decode()] += 1

    def _version(self, message: bytes, facts: list[str]) -> None:
        if match := _TEXTS["rccl_version"].search(message):
            self.rccl_version = self.rccl_version or match[1].decode()
            facts.append("RCCL version")
            return
        match = _TEXTS["version"].search(message) or _TEXTS["vllm_version"].search(message)
        if match and len(self.versions) < 64:
            self.versions[match[1].decode()] += 1
            facts.append("NCCL version")

    def _environment(self, message: bytes) -> None:
        match = _TEXTS["environment"].search(message)
        if match and (match[1].decode() in self.environment or len(self.environment) < MAX_VALUES):
            self.variable = match[1].decode()
            self.environment[self.variable] = match[2][:200].decode("utf-8", "replace")

    def _network(self, message: bytes, host: bytes, facts: list[str]) -> None:
        if match := _TEXTS["network"].search(message):
            name = match[1].decode()
            if name in self.networks or len(self.networks) < 64:
                self.networks[name] += 1
                facts.append(f"network {name} selected")
        elif (match := _TEXTS["assigned"].search(message)) and len(self.assigned) < 64:
            self.assigned[match[1].decode()] += 1
        elif b"NET/IB : No device found" in message:
            self.no_ib_device += 1
            facts.append("no RDMA device")
        elif b"NET/Socket : Using" in message:
            for name in _TEXTS["sockets"].findall(message[:2000]):
                if len(self.sockets) < 64:
                    self.sockets[name.decode("utf-8", "replace")] = None
            facts.append("socket interfaces")
        elif b"NET/Socket : " in message and b" interfaces found" in message:  # 2.3 and 2.4
            facts.append("socket interfaces")
            self.sockets.setdefault(next(iter(self.bootstrap), "unknown"), None)
        elif (match := _TEXTS["ib_using"].search(message)) and _TEXTS["port"].search(match[1]):
            self._ports(match, host)
            facts.append("RDMA devices in use")
        elif (match := _TEXTS["provider"].search(message)) and len(self.providers) < 64:
            self.providers[match[1].decode()] += 1
            facts.append(f"libfabric provider {match[1].decode()}")

    def _ports(self, match: re.Match[bytes], host: bytes) -> None:
        self.ib_listed += 1
        if host not in self.ports and len(self.ports) >= MAX_VALUES * 8:
            return
        row = self.ports.setdefault(host, {})
        if match[2]:
            self.whole_lists.add(host)
        position = -1
        for index, port, layer in _TEXTS["port"].findall(match[1]):
            position = int(index) if index else position + 1
            kind = "IB" if layer == b"IB" else "RoCE"
            if len(row) < 128:
                row[port.decode()] = kind
                self.port_of_index.setdefault(position, set()).add(kind)

    def _ranks(self, message: bytes, facts: list[str]) -> None:
        if match := _TEXTS["nodes"].search(message):
            self.ranks = max(self.ranks, int(match[1]))
            self.nodes = max(self.nodes, int(match[2]))
            self.local_ranks = max(self.local_ranks, int(match[3]))
            facts.append("nodes of the communicator")
        elif match := _TEXTS["ranks"].search(message):
            self.ranks = max(self.ranks, int(match[1]))

    def _add_gdr_word(self, host: str, *words: str) -> None:
        if host in self.gdr_words or len(self.gdr_words) < MAX_PLACES:
            self.gdr_words.setdefault(host, set()).update(words)

    def _gdr(self, message: bytes, host: str, facts: list[str]) -> None:
        if match := _TEXTS["gdr_hca"].search(message):
            enabled = match[2].lower() == b"enabled"
            if match[1] != b"Socket":
                self._add_gdr_word(host, "usable" if enabled else "refused")
            if len(self.gdr_hca) < 64:
                self.gdr_hca[(match[1].decode(), enabled)] += 1
            facts.append(f"GPUDirect RDMA {'possible on' if enabled else 'refused by'} a device")
        elif match := _TEXTS["gdr_path"].search(message):
            key = (match[1] == b"Enabled", int(match[2][:4]), int(match[3][:4]))
            self._add_gdr_word(host, "near" if key[0] else "far")
            self.gdr_read_allowed |= key[0] and match[4] == b"1"
            if key in self.gdr_paths or len(self.gdr_paths) < 64:
                self.gdr_paths[key] += 1
            if not key[0]:
                facts.append("GPUDirect RDMA too far")
        elif _TEXTS["gdr_hca_24"].search(message):
            self.gdr_hca[("IB", False)] += 1
            self._add_gdr_word(host, "refused")
            facts.append("GPUDirect RDMA refused by a device")
