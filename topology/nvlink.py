"""How many NVLinks join two GPUs, from what NVML says of each GPU's links.

Specification: NVML nvmlDeviceGetNvLinkState, nvmlDeviceGetNvLinkRemotePciInfo, nvmlDeviceGetP2PStatus. A link ends at a
GPU, at an NVSwitch (then it reaches every GPU of the switch) or, in a virtual machine, at an end that is hidden.
"""

from __future__ import annotations

from collections import Counter

from probes.gpu.answers import LINKS_MAX
from probes.gpu.facts import UNREAD, Gpu, GpuFacts, GpuPair, NvLink
from topology.graph import GpuNode, Pair, PathClass
from topology.nccl import nvlink_bytes_per_second


def active_targets(gpu: Gpu) -> tuple[tuple[tuple[str, str | None], int], ...]:
    """((kind, bus id), count) of the ends of a GPU's active links, in order of first appearance."""
    ends = Counter(
        (_told(link.remote_kind) or "unknown", _told(link.remote_bus_id)) for link in gpu.nvlinks if link.active
    )
    return tuple(ends.items())


def _told(end: str | None) -> str | None:
    return None if end == UNREAD else end


def joined(a: GpuNode, b: GpuNode, count: int, evidence: str, *, unread: int = 0) -> Pair:
    """The pair of two GPUs with so many NVLinks between them, or `unread` more; the slower generation sets the rate."""
    speeds = [nvlink_bytes_per_second(gpu.compute_capability) for gpu in (a, b)]
    known = [speed for speed in speeds if speed is not None]
    return Pair(
        a=a.name,
        b=b.name,
        label=f"NV{count}",
        path=PathClass.NVL,
        nvlinks=count,
        nvlinks_unread=unread,
        bytes_per_second=count * min(known) if len(known) == len(speeds) else None,
        evidence=evidence,
    )


class NvLinks:
    """NVLink counts of every pair; collects what looks wrong in `warnings`."""

    def __init__(self, facts: GpuFacts | None) -> None:
        self._gpus = {gpu.index: gpu for gpu in facts.gpus} if facts else {}
        self._pairs = {(pair.a, pair.b): pair for pair in facts.pairs} if facts else {}
        self.warnings: list[str] = []

    def _pair(self, a: int, b: int) -> GpuPair | None:
        return self._pairs.get((min(a, b), max(a, b)))

    def ancestor(self, a: int, b: int) -> str | None:
        """NVML's common ancestor of two GPUs in nvidia-smi's words, None where NVML does not say."""
        pair = self._pair(a, b)
        return pair.ancestor if pair else None

    def between(self, a: int, b: int) -> tuple[int | None, str]:
        """(links that work both ways, what that rests on); None where the driver did not tell enough to say.

        A link whose state or end was not read is neither there nor missing: what is known of the others stands.
        """
        first, second = self._gpus.get(a), self._gpus.get(b)
        if first is None or second is None:
            return 0, ""
        direct = _direct(first, second), _direct(second, first)
        if any(direct):
            short = first if direct[0] < direct[1] else second
            if direct[0] != direct[1] and self.unread(short.index) >= abs(direct[0] - direct[1]):
                return max(direct), f"nvml: remote ends of the links, as GPU{b if short is first else a} tells them"
            return self._lower(a, b, *direct), "nvml: remote ends of the links"
        switched = _ending_at(first, "nvswitch"), _ending_at(second, "nvswitch")
        if all(switched):
            if not (self.unread(a) or self.unread(b)):
                self._note_short(a, b, *switched)
            return min(switched), "nvml: links to NVSwitch"
        hidden = _ending_at(first, None), _ending_at(second, None)
        if all(hidden):
            return self._hidden(a, b, *hidden)
        if (self.unread(a) or self.unread(b)) and self._may_link(first) and self._may_link(second):
            pair = self._pair(a, b)
            if pair is None or pair.p2p_nvlink in (None, "ok", "unknown"):
                return None, "nvml did not tell of all NVLinks"
        return 0, ""

    def unread(self, index: int) -> int:
        """Links of a GPU that may be up and of which the driver did not tell the state or the end."""
        gpu = self._gpus.get(index)
        if gpu is None or gpu.broken:
            return 0
        if gpu.error is not None or not gpu.nvlinks_known:
            return LINKS_MAX
        return sum(_untold(link) for link in gpu.nvlinks)

    def unread_between(self, a: int, b: int) -> int:
        """By how many links the count of a pair may be too low."""
        return max(self.unread(a), self.unread(b))

    def _may_link(self, gpu: Gpu) -> bool:
        """Whether some link of the GPU may lead to another than those that are told."""
        return bool(self.unread(gpu.index) or _ending_at(gpu, "nvswitch") or _ending_at(gpu, None))

    def _lower(self, a: int, b: int, first: int, second: int) -> int:
        if first != second:
            self.warnings.append(
                f"GPU{a} has {first} NVLinks towards GPU{b}, GPU{b} has {second} back: the lower count works both ways"
            )
        return min(first, second)

    def _note_short(self, a: int, b: int, first: int, second: int) -> None:
        """Once for each GPU with fewer links to the switch than another has."""
        if first != second:
            short, other = (a, b) if first < second else (b, a)
            said = f"GPU{short} has {min(first, second)} NVLinks to the NVSwitch, "
            if not any(warning.startswith(said) for warning in self.warnings):
                self.warnings.append(f"{said}GPU{other} has {max(first, second)}: the lower count works both ways")

    def _hidden(self, a: int, b: int, first: int, second: int) -> tuple[int, str]:
        """A hypervisor hides where links end: the P2P status says whether these two are joined by them."""
        if not self._joined(a, b):
            return 0, ""
        peers = [other for other in self._gpus if other != a and self._joined(a, other)]
        if len(peers) == len(self._gpus) - 1 or len(peers) == 1:
            how = "a switch, or all links to the one peer"
            return self._lower(a, b, first, second), f"nvml: far ends hidden, P2P over NVLink is ok: {how}"
        share = min(first, second) // len(peers)
        self.warnings.append(
            f"GPU{a} to GPU{b}: far ends of the NVLinks are hidden and GPU{a} has {len(peers)} peers: "
            f"the count of {share} is an even share, not a reading"
        )
        return share, "nvml: far ends hidden, even share of the links"

    def peer_access(self, a: int, b: int) -> bool | None:
        """Whether the driver lets one GPU read the other's memory; None where it does not say."""
        pair = self._pair(a, b)
        said = pair.p2p_read if pair else None
        return None if said in (None, "unknown") else said == "ok"

    def _joined(self, a: int, b: int) -> bool:
        pair = self._pair(a, b)
        if pair and pair.p2p_nvlink is not None:
            return pair.p2p_nvlink == "ok"
        first, second = self._gpus[a], self._gpus[b]
        return first.fabric_clique is not None and first.fabric_clique == second.fabric_clique


def _untold(link: NvLink) -> bool:
    """Whether it is open where the link leads; of a link to a switch it does not matter to which."""
    if not link.active:
        return link.active is None
    return link.remote_kind == UNREAD or (link.remote_bus_id == UNREAD and link.remote_kind != "nvswitch")


def _direct(gpu: Gpu, other: Gpu) -> int:
    return sum(1 for link in gpu.nvlinks if link.active and link.remote_bus_id and link.remote_bus_id == other.bus_id)


def _ending_at(gpu: Gpu, kind: str | None) -> int:
    return sum(1 for link in gpu.nvlinks if link.active and link.remote_kind == kind)
