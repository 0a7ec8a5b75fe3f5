"""One RC queue pair over libibverbs, through the distribution's pyverbs (python3-pyverbs), imported when asked for.

Specification: ibv_modify_qp(3), ibv_post_send(3), ibv_reg_mr(3), ibv_query_gid_table(3). Numbers of enumerations are
those of infiniband/verbs.h: pyverbs moved its own between releases.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ACCESS = 1 | 2  # IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE
_RELIABLE = 2  # IBV_QPT_RC
_WRITE, _WRITE_WITH_IMMEDIATE = 0, 1  # IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM
_ACTIVE = 4  # IBV_PORT_ACTIVE
_ETHERNET = 2  # IBV_LINK_LAYER_ETHERNET
_ROCE_V2 = 2  # IBV_GID_TYPE_ROCE_V2, as ibv_query_gid_table counts
_MTU_CODES = (1, 2, 3, 4, 5)  # IBV_MTU_256 .. IBV_MTU_4096: 128 << code bytes
_TIMEOUT = 14  # 4.096 us x 2^14 = 67 ms, perftest's default (--qp-timeout)
_RETRIES = 7
_RNR_TIMER = 12  # 0.64 ms, InfiniBand specification, table 45
_FAILURES = {
    9: "the target refused the access (remote invalid request)",
    10: "the target refused the access (remote access error)",
    12: "the target did not acknowledge: retries ran out",
    13: "the target had no receive posted: retries ran out",
}  # enum ibv_wc_status
VERBS_CLASS = Path("/sys/class/infiniband_verbs")
NODES = Path("/dev/infiniband")


class RdmaError(Exception):
    """RDMA cannot be used here, or did not do what it must; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GidEntry:
    """A used entry of a port's GID table."""

    index: int
    gid: str
    roce_v2: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What the other side must know of this one to reach it."""

    queue_pair: int
    packet_sequence: int
    gid: str
    lid: int
    mtu_code: int
    key: int  # of the memory that may be written
    address: int
    length: int

    def __post_init__(self) -> None:
        ipaddress.IPv6Address(self.gid)
        widths = {"queue_pair": 24, "packet_sequence": 24, "lid": 16, "key": 32, "address": 64, "length": 40}
        for name, bits in widths.items():
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 1 << bits:
                raise ValueError(f"{name}={value!r} is not allowed; allowed: a number of {bits} bits")
        if self.mtu_code not in _MTU_CODES:
            raise ValueError(f"mtu_code={self.mtu_code!r} is not allowed; allowed: {_MTU_CODES}")


class Queue:
    """Registered memory and a queue pair on one port; use it as a context."""

    def __init__(self, *, device: str | None, port: int, gid_index: int | None, length: int, depth: int) -> None:
        self._held = ExitStack()
        try:
            self._open(device, port, gid_index, length, depth)
        except BaseException:
            self._held.close()
            raise

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _open(self, device: str | None, port: int, gid_index: int | None, length: int, depth: int) -> None:
        with pyverbs_needed():
            from pyverbs.cq import CQ
            from pyverbs.device import Context
            from pyverbs.mr import MR
            from pyverbs.pd import PD
            from pyverbs.qp import QP, QPCap, QPInitAttr

        self.device, self.port, self.length = choose_device(device), port, length
        check_node(self.device)
        with explained(f"opening {self.device}"):
            context = self._held.enter_context(Context(name=self.device))
            attributes = context.query_port(port)
        if attributes.state != _ACTIVE:
            raise RdmaError(f"{self.device}:{port} is not ACTIVE (state {attributes.state}): check link and cable")
        self.ethernet = attributes.link_layer == _ETHERNET
        entry = choose_gid(gid_table(context, port), gid_index, ethernet=self.ethernet, where=f"{self.device}:{port}")
        self.gid_index = entry.index
        with explained(f"ibv_reg_mr of {length} bytes on {self.device}"):
            domain = self._held.enter_context(PD(context))
            self._memory = self._held.enter_context(MR(domain, length, _ACCESS))
        with explained(f"ibv_create_qp on {self.device}"):
            self._completions = self._held.enter_context(CQ(context, depth + 2))
            capacity = QPCap(max_send_wr=depth + 1, max_recv_wr=1)
            wanted = QPInitAttr(qp_type=_RELIABLE, scq=self._completions, rcq=self._completions, cap=capacity)
            self._pair = self._held.enter_context(QP(domain, wanted))
        self.here = Endpoint(
            queue_pair=self._pair.qp_num,
            packet_sequence=int.from_bytes(os.urandom(3)),
            gid=entry.gid,
            lid=attributes.lid,
            mtu_code=attributes.active_mtu,
            key=self._memory.rkey,
            address=self._memory.buf,
            length=length,
        )

    def connect(self, there: Endpoint) -> int:
        """Bring the queue pair up against the other side's; gives the MTU in bytes."""
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        route = GlobalRoute(dgid=GID(there.gid), sgid_index=self.gid_index, hop_limit=64)
        address = (
            AHAttr(gr=route, is_global=1, port_num=self.port)
            if self.ethernet
            else AHAttr(dlid=there.lid, is_global=0, port_num=self.port)
        )
        wanted = QPAttr(port_num=self.port)
        wanted.qp_access_flags = _ACCESS
        wanted.pkey_index = 0
        wanted.path_mtu = min(self.here.mtu_code, there.mtu_code)
        wanted.dest_qp_num, wanted.rq_psn, wanted.sq_psn = (
            there.queue_pair,
            there.packet_sequence,
            self.here.packet_sequence,
        )
        wanted.max_dest_rd_atomic = wanted.max_rd_atomic = 1
        wanted.timeout, wanted.retry_cnt, wanted.rnr_retry, wanted.min_rnr_timer = (
            _TIMEOUT,
            _RETRIES,
            _RETRIES,
            _RNR_TIMER,
        )
        wanted.ah_attr = address
        with explained(f"connecting {self.device}:{self.port}, GID {self.here.gid}, to {there.gid}"):
            self._pair.to_rts(wanted)
        return 128 << int(min(self.here.mtu_code, there.mtu_code))

    def fill(self, content: bytes) -> None:
        """Put content at the start of the registered memory."""
        self._memory.write(content, len(content))

    def content(self) -> bytes:
        """All of the registered memory."""
        return bytes(self._memory.read(self.length, 0))

    def request(self, offset: int, length: int, there: Endpoint, *, immediate: bool = False) -> Any:
        """A write of part of this memory to the same place of the other side's; may be posted many times."""
        from pyverbs.wr import SGE, SendWR

        part = SGE(self._memory.buf + offset, length, self._memory.lkey)
        opcode = _WRITE_WITH_IMMEDIATE if immediate else _WRITE
        request = SendWR(opcode=opcode, num_sge=1, sg=[part])
        request.set_wr_rdma(there.key, there.address + offset)
        return request

    def post(self, request: Any) -> None:
        """Hand a request to the device."""
        self._pair.post_send(request)

    def post_receive(self) -> None:
        """Let the other side's next write with immediate data complete here."""
        from pyverbs.wr import SGE, RecvWR

        # The data goes where the write says; pyverbs wants a place all the same.
        self._pair.post_recv(RecvWR(num_sge=1, sg=[SGE(self._memory.buf, 1, self._memory.lkey)]))

    def completed(self, most: int) -> int:
        """How many requests have ended since the last call, without waiting; raises where one failed."""
        number, ended = self._completions.poll(most)
        for completion in ended:
            if completion.status:
                why = _FAILURES.get(completion.status, "see enum ibv_wc_status")
                raise RdmaError(f"a write failed with status {completion.status}: {why}")
        return int(number)

    def wait(self, number: int, timeout_seconds: float) -> None:
        """Until so many requests have ended."""
        end = time.monotonic() + timeout_seconds
        while number > 0:
            number -= self.completed(number)
            if number > 0 and time.monotonic() > end:
                raise RdmaError(f"{number} requests did not end within {timeout_seconds:.0f} s")


@contextmanager
def pyverbs_needed() -> Iterator[None]:
    """Say how to get pyverbs where it, or libibverbs, is missing."""
    try:
        yield
    except ImportError as error:
        raise RdmaError(
            f"pyverbs cannot be imported ({error}): install the distribution's python3-pyverbs and use the system's "
            "Python, or an environment made with --system-site-packages"
        ) from error


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn pyverbs' error into one that says what to do."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except PyverbsError as error:
        number = getattr(error, "error_code", 0) or 0
        if number == errno.ENOMEM and doing.startswith("ibv_reg_mr"):
            raise RdmaError(f"{doing}: {os.strerror(number)}: {memlock_told()}") from error
        raise RdmaError(f"{doing}: {str(error).splitlines()[0]}") from error


def memlock_told() -> str:
    """What bounds a registration in this process, and how to raise it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "RLIMIT_MEMLOCK is unlimited, so memory itself is short (or the container's memory limit is reached)"
    size = f"{soft >> 10} KiB" if soft >= 1024 and soft % 1024 == 0 else f"{soft} bytes"
    return (
        f"RLIMIT_MEMLOCK is {size} for uid {os.getuid()}; raise it: ulimit -l unlimited, LimitMEMLOCK=infinity in the "
        'systemd unit, --ulimit memlock=-1 for a container, default_ulimits = ["memlock=-1:-1"] of CRI-O for pods'
    )


def choose_device(wanted: str | None) -> str:
    """The device asked for, or the only one there is."""
    from pyverbs.device import get_device_list
    from pyverbs.pyverbs_error import PyverbsError

    try:
        names = [d.name.decode() if isinstance(d.name, bytes) else str(d.name) for d in get_device_list()]
    except PyverbsError as error:
        raise RdmaError(f"no RDMA device: the kernel has no RDMA ({str(error).splitlines()[0]})") from error
    if not names:
        raise RdmaError("no RDMA device: load the card's driver, or give the container its devices")
    if wanted is None and len(names) > 1:
        raise RdmaError(f"several RDMA devices, name one with --device; allowed: {', '.join(names)}")
    if wanted is not None and wanted not in names:
        raise RdmaError(f"--device {wanted}: no such RDMA device; allowed: {', '.join(names)}")
    return wanted or names[0]


def check_node(device: str) -> None:
    """The kernel says EACCES and pyverbs ENOENT where the node may not be opened: look at the node itself."""
    for entry in VERBS_CLASS.glob("uverbs*"):
        try:
            named = (entry / "ibdev").read_text().strip()
        except OSError:
            continue
        node = NODES / entry.name
        if named != device:
            continue
        if not node.exists():
            raise RdmaError(f"{node} of {device} is not here: give the container the device")
        if not os.access(node, os.R_OK | os.W_OK):
            mode = node.stat().st_mode & 0o777
            raise RdmaError(f"uid {os.getuid()} may not open {node} (mode {mode:04o}): it needs read and write access")


def gid_table(context: Any, port: int) -> list[GidEntry]:
    """The used entries of one port."""
    with explained("ibv_query_gid_table"):
        size = context.query_port(port).gid_tbl_len
        found = context.query_gid_table(max(1, size * context.query_device().phys_port_cnt))
    return [
        GidEntry(index=_value(e.gid_index), gid=_value(e.gid_str), roce_v2=_value(e.gid_type) == _ROCE_V2)
        for e in found
        if _value(e.port_num) == port
    ]


def _value(attribute: Any) -> Any:
    """Some of an entry's values are methods, some properties."""
    return attribute() if callable(attribute) else attribute


def choose_gid(table: list[GidEntry], wanted: int | None, *, ethernet: bool, where: str) -> GidEntry:
    """The entry asked for; else on Ethernet the first IPv4 entry of RoCE v2, then any of RoCE v2; on InfiniBand 0."""
    by_index = {entry.index: entry for entry in table}
    if wanted is not None or not ethernet:
        if (wanted or 0) not in by_index:
            raise RdmaError(f"--gid-index {wanted or 0}: {where} has no such GID; allowed: {sorted(by_index)}")
        return by_index[wanted or 0]
    second = [entry for entry in table if entry.roce_v2]
    if not second:
        raise RdmaError(f"{where} has no RoCE v2 GID: give its network interface an address")
    return min(second, key=lambda e: (ipaddress.IPv6Address(e.gid).ipv4_mapped is None, e.index))
