"""INFO messages of NCCL and RCCL that state a fact: version, network, devices, nodes, variables, GPUDirect RDMA.

Surface: NCCL src/init.cc, src/plugin/net.cc, src/transport/net_ib*, src/transport/net_socket.cc, src/graph/paths.cc,
src/misc/param.cc, versions 2.4 to 2.32; RCCL; aws-ofi-nccl. facts.toml has their texts. "Connected all rings, ... GDR
1" is not among them, because 1 is its initial value.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

from contracts.tables import insert_pieces, read_patterns, read_table
from hardware.gpus import is_of, pattern

MAX_PLACES = 32_768

FABRIC = "fabric: "  # start of facts about NVLS and MNNVL, which prove no transport
END = "the end of the job"
STEP = "a step of training"
_TEXTS = read_patterns(__file__, "facts.toml", "facts", str.encode)
_SPARK_PORT = re.compile(r"roce(?:P2)?p1s0f[01]")

# Tables of limited size: the memory for a log must not grow with its length.

Key = TypeVar("Key")
Value = TypeVar("Value")


class Firsts(dict[Key, Value]):
    """The first value of each key, for at most `most` keys."""

    def __init__(self, limit: int = 512) -> None:
        super().__init__()
        self.most = limit

    def add(self, key: Key, value: Value) -> None:
        """Store the value, unless the key already has one."""
        if len(self) < self.most:
            self.setdefault(key, value)

    def merge(self, other: Mapping[Key, Value]) -> None:
        """Add the values of another table."""
        for key, value in other.items():
            self.add(key, value)


class Lasts(Firsts[Key, Value]):
    """The last value of each key, for at most `most` keys."""

    def add(self, key: Key, value: Value) -> None:
        """Store the value; it replaces an earlier one."""
        if key in self or len(self) < self.most:
            self[key] = value


class Tally(Firsts[Key, int], Counter[Key]):
    """Counts of keys, for at most `most` keys."""

    def add(self, key: Key, value: int = 1) -> None:
        """Count the key."""
        if key in self or len(self) < self.most:
            self[key] += value


def merge_attributes(target: object, theirs: object, names: Iterable[str]) -> None:
    """Merge these attributes of `theirs` into `target`: add tables, and take the larger of two plain values.

    None is the smallest value, and True is larger than False.
    """
    for name in names:
        value, other = getattr(target, name), getattr(theirs, name)
        if hasattr(value, "merge"):
            value.merge(other)
        else:
            setattr(target, name, max((each for each in (value, other) if each is not None), default=None))


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One row of facts.toml, which describes the members."""

    pattern: re.Pattern[bytes]
    flag: str = ""
    count: str = ""
    after: str = ""  # `count` only if this was counted before
    proves: str = ""


@cache
def _rows() -> tuple[tuple[bytes, _Row], ...]:
    """Return the rows, each with every one of its texts."""
    table = read_table(__file__, "facts.toml")
    rows = []
    for row in table["rows"]:
        texts = [row["text"]] if isinstance(row["text"], str) else row["text"]
        source = insert_pieces(row["pattern"], table["pieces"]) if "pattern" in row else "|".join(map(re.escape, texts))
        members = {name: row[name] for name in ("flag", "count", "after", "proves") if name in row}
        fact = _Row(re.compile(source.encode()), **members)
        rows += [(text.encode(), fact) for text in texts]
    return tuple(rows)


@cache
def _gpu_name() -> re.Pattern[bytes]:
    """Match names of GPUs as the driver prints them ("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB")."""
    return re.compile(
        rb"(?:NVIDIA[ -]|Tesla[ -]|(?<![A-Za-z])(?=GeForce|Quadro))(%s\b[\w -]{0,40})" % pattern("model").encode()
    )


def gpus_before_ampere(names: Iterable[str]) -> bool | None:
    """Return whether these GPUs send without GPUDirect RDMA by default; None if the names do not say.

    Below compute capability 8.0 NCCL does so unless NVLink joins the GPU to another (ncclTopoCheckGdr,
    src/graph/paths.cc).
    """
    older = {name: is_of("before Ampere", name) for name in names}
    if any(is_of("Ampere or later", name) or (older[name] and is_of("NVLink board", name)) for name in older):
        return False
    return True if older and all(older.values()) else None


def gpus_are(kind: str, names: Collection[str]) -> bool:
    """Return whether all these GPUs are of a kind. NVLink joins some cards in pairs, and most not at all."""
    return all(is_of(kind, name) for name in names) and bool(names)


class CommunicatorRank(NamedTuple):
    """A rank of a communicator, and where it runs."""

    size: int  # ranks of the communicator
    rank: int
    host: str
    gpu: str  # bus id, or "device 0"
    process: str
    device: str


class Facts:
    """The facts that messages state."""

    def __init__(self) -> None:
        self.versions: Tally[str] = Tally(64)
        self.rccl_versions: Tally[str] = Tally(64)
        self.rccl = False  # there is a line that only RCCL prints
        self.networks: Tally[str] = Tally(64)
        self.assigned: Tally[str] = Tally(64)  # networks of communicators
        self.counts: Tally[str] = Tally()  # messages: "no RDMA device", "RDMA devices", "socket interfaces"
        self.ranks = 0
        self.nodes = 0
        self.local_ranks = 0
        self.environment: Firsts[str, str] = Firsts()
        self.setting = ""  # of an environment variable, in the current message: "NAME=VALUE"
        self.ports: Firsts[tuple[str, str], str] = Firsts(MAX_PLACES)  # (host, port): link layer
        self.addresses: Firsts[tuple[str, str], None] = Firsts(MAX_PLACES)  # (address of an interface, host)
        self.whole_lists: Firsts[str, None] = Firsts(4_096)  # hosts whose list of ports was read to its end
        self.layers: Firsts[tuple[int, str], None] = Firsts(4_096)  # (number of a device, link layer)
        self.sockets: Tally[str] = Tally(64)  # interfaces
        self.bootstrap: Tally[str] = Tally(64)  # interfaces
        self.gdr_hca: Tally[tuple[str, bool]] = Tally(64)  # (network, enabled)
        # Per host, what its lines say of GPUDirect RDMA: "usable", "refused", "near", "far" (GPU and NIC).
        self.gdr_words: Firsts[tuple[str, str], None] = Firsts(MAX_PLACES)
        self.gdr_paths: Tally[tuple[bool, int, int]] = Tally(64)  # (enabled, distance, limit)
        self.gdr_read_allowed = False  # there is a path on which sends may use GPUDirect RDMA
        self.providers: Tally[str] = Tally(64)  # of libfabric
        self.nvls_support: Tally[str] = Tally()  # "available", "not available"
        self.nvls_made = False  # a communicator set it up
        self.mnnvl_flags: Tally[str] = Tally()  # of communicators: "0", "1"
        self.mnnvl_fabric = False  # a GPU reports a fabric that joins nodes
        self.mnnvl_clique = 0
        self.nvlink = False  # the best graph joins GPUs by NVLink: "type NVL/PIX"
        self.gpus: Tally[str] = Tally(64)
        self.finished = False  # a line says that the job, or the test, finished
        self.members: Firsts[CommunicatorRank, None] = Firsts(MAX_PLACES)  # of all communicators
        self.setups: Firsts[tuple[CommunicatorRank, str], None] = Firsts(MAX_PLACES)  # (.., "START" or "COMPLETE")
        self.channel_heads: Firsts[bytes, str] = Firsts(4_096)  # "00/0 : 0[0] -> 8[0] [send] ": host that wrote it
        self.test_ranks: Firsts[int, str] = Firsts(4_096)  # rank of nccl-tests: host

    def merge(self, other: Facts) -> None:
        """Add the facts of another part of the same run."""
        merge_attributes(self, other, vars(self))

    # --- what several messages say together

    @property
    def provider(self) -> str | None:
        """Return the provider of libfabric that most processes chose."""
        return max(self.providers, key=lambda name: self.providers[name]) if self.providers else None

    @property
    def mnnvl(self) -> bool | None:
        """Return whether a communicator uses MNNVL; None if no message says."""
        return "1" in self.mnnvl_flags if self.mnnvl_flags else None

    @property
    def largest_communicator(self) -> dict[int, CommunicatorRank]:
        """Return each rank of the largest communicator where the log names it first."""
        largest = max((member.size for member in self.members), default=0)
        return {member.rank: member for member in reversed(self.members) if member.size == largest}

    def rank_devices(self) -> set[tuple[int, bytes]]:
        """Return ranks and devices of channel lines: "8[0]" (device of NVML, 2.18 on) or "8[1b000]" (bus)."""
        devices: set[tuple[int, bytes]] = set()
        for head in self.channel_heads:
            if match := _TEXTS["place"].search(head):
                devices.update(((int(match[1]), match[2]), (int(match[3]), match[4])))
        return devices

    def channel_hosts(self) -> dict[int, str]:
        """Return the ranks that wrote a channel line, and their hosts; one end of a channel wrote its line."""
        return {
            int(match[3 if b"[receive]" in head else 1]): host
            for head, host in self.channel_heads.items()
            if (match := _TEXTS["place"].search(head))
        }

    def unread_ranks(self) -> tuple[int, ...]:
        """Return the ranks of the largest communicator that wrote no line."""
        present = {*self.largest_communicator, *self.channel_hosts()}
        # Without a limit that was reached: else some ranks were left out.
        is_complete = 0 < len(self.members) < MAX_PLACES and 2 * len(self.channel_heads) < self.channel_heads.most
        return tuple(rank for rank in range(min(self.ranks, MAX_PLACES)) if rank not in present) if is_complete else ()

    def gpu_names(self) -> tuple[str, ...]:
        """Return the names of GPUs. Without one, DGX Spark is recognised by the places of its devices."""
        if self.gpus:
            return tuple(sorted(self.gpus))
        # The GPU is in PCI domain f, and the two ports of the ConnectX-7 in two domains.
        at_f = any(member.gpu == "f01000" for member in self.largest_communicator.values())
        ports = {port.split(":")[0] for _, port in self.ports}
        return ("GB10",) if at_f and any(_SPARK_PORT.fullmatch(port) for port in ports) else ()

    def all_on_one_host(self) -> bool:
        """Return whether each rank (of nccl-tests, or with a GPU of its own) is known, and all are on one host."""
        members, tests, writers = self.largest_communicator.values(), self.test_ranks, self.channel_hosts()
        devices = self.rank_devices()
        listings = []  # hosts and number of the ranks, from each kind of line that names all ranks
        if 0 < self.ranks == len(members) == len({(member.host, member.gpu) for member in members}):
            listings.append(({member.host for member in members}, len(members)))
        if 0 < len(tests) == max(tests, default=0) + 1 and self.ranks in (0, len(tests)):
            listings.append((set(tests.values()), len(tests)))
        # A channel line without a direction does not show which of its two ranks wrote it.
        has_ends = any(b"[receive]" in head or b"[send]" in head for head in self.channel_heads)
        has_own_gpus = len({device for _, device in devices}) == len(devices) == len(writers)
        if has_ends and has_own_gpus and self.ranks in (0, len(writers)) and all(writers.values()):
            listings.append((set(writers.values()), len(writers)))
        return any(len(hosts) == 1 and all(rank < size for rank, _ in devices) for hosts, size in listings)

    # --- reading a message

    def take(self, message: bytes, host: str) -> list[str]:
        """Store the facts of a message; return the names of those that it proves."""
        proven: list[str] = []
        self.setting = ""
        for row in dict.fromkeys(row for text, row in _rows() if text in message):
            self._take_row(row, message, proven)
        if b" set " in message and (match := _TEXTS["environment"].search(message)):
            name, value = match[1].decode(), match[2][:200].decode("utf-8", "replace")
            self.setting = f"{name}={value}"
            self.environment.add(name, value)
        if b"NET/" in message and (match := _TEXTS["ib_using"].search(message)) and _TEXTS["port"].search(match[1]):
            self._take_ports(match, host)
            proven.append("RDMA devices in use")
        for one in _TEXTS["address"].findall(message) if host and (b"<0>" in message or b" id: i-" in message) else ():
            self.addresses.add((one.decode(), host), None)
        if b"GPU Direct RDMA" in message or b"DMA-BUF" in message:
            self._take_gdr(message, host, proven)
        if b" Pid " in message and (match := _TEXTS["test_rank"].search(message)):
            self.test_ranks.add(int(match[1]), match[2].decode("utf-8", "replace"))
        has_gpu = b"NVIDIA" in message or b"Tesla" in message or b"GeForce" in message or b" Pid " in message
        if has_gpu and (match := _gpu_name().search(message) or _TEXTS["test_gpu"].search(message)):
            name = b" ".join(match[1].split()).decode("utf-8", "replace")
            if name not in self.gpus:
                proven.append(f"GPU {name}")
            self.gpus.add(name)
        return proven

    def _take_row(self, row: _Row, message: bytes, proven: list[str]) -> None:
        """Store the groups of each match in the members of these names."""
        groups: dict[str, str] | None = None
        for match in row.pattern.finditer(message):
            groups = {name: value.decode("utf-8", "replace") for name, value in match.groupdict().items()}
            for name, value in groups.items():
                current = getattr(self, name)
                if isinstance(current, Tally):
                    current.add(value)
                else:
                    setattr(self, name, max(current, int(value)))
        if groups is None:
            return
        if row.flag:
            setattr(self, row.flag, True)
        if row.count and (not row.after or row.after in self.counts):
            self.counts.add(row.count)
        if row.proves:
            proven.append(row.proves.format(**groups))

    def _take_ports(self, match: re.Match[bytes], host: str) -> None:
        self.counts.add("RDMA devices")
        if match[2]:
            self.whole_lists.add(host, None)
        position = -1
        for index, port, layer in _TEXTS["port"].findall(match[1])[:128]:
            position = int(index) if index else position + 1
            kind = "IB" if layer == b"IB" else "RoCE"
            self.ports.add((host, port.decode()), kind)
            self.layers.add((position, kind), None)

    def _take_gdr(self, message: bytes, host: str, proven: list[str]) -> None:
        if message.startswith(b"DMA-BUF is available on GPU device"):
            self.gdr_words.add((host, "usable"), None)
        elif match := _TEXTS["gdr_hca"].search(message):
            enabled = match["state"].lower() == b"enabled"
            network = (match["network"] or b"IB").decode()
            if network != "Socket":
                self.gdr_words.add((host, "usable" if enabled else "refused"), None)
            if _SPARK_PORT.search(message.decode(errors="replace")):
                self.gdr_words.add((host, "on a port named as on DGX Spark"), None)
            self.gdr_hca.add((network, enabled))
            proven.append(f"GPUDirect RDMA {'possible on' if enabled else 'refused by'} a device")
        elif match := _TEXTS["gdr_path"].search(message):
            key = (match[1] == b"Enabled", int(match[2][:4]), int(match[3][:4]))
            self.gdr_words.add((host, "near" if key[0] else "far"), None)
            self.gdr_read_allowed |= key[0] and match[4] == b"1"
            self.gdr_paths.add(key)
            if not key[0]:
                proven.append("GPUDirect RDMA too far")
