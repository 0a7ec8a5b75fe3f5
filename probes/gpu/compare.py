"""Rules that compare the GPUs of one host: models, settings, NVLinks, fabric, P2P, and GPUs missing from this process.

sysfs shows every GPU of the machine, even in a container, but NVML lists only GPUs whose device node this process may
open. So a GPU that NVML does not list is a fault only if its node can be opened, or if nothing restricts this process.
In a container that requested all GPUs, a missing node proves nothing, because the toolkit creates nodes only for GPUs
that NVML listed.

Sources: NVML API reference, nvmlDeviceGetCount_v2; NVIDIA Container Toolkit (device nodes, and in its legacy mode the
folders of /proc/driver/nvidia/gpus, for the assigned GPUs only).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from contracts.finding import Finding, Status, by_loss
from hardware.gpus import compute_clock_share, find_gpu, is_card, refuses_peers, soldered
from hardware.units import some
from probes.gpu.facts import PROC, BusGpu, Gpu, GpuBus, GpuFacts, GpuPair
from probes.gpu.health import WORDS, finding, name_subject
from probes.pci.facts import DEVICES


def compare(facts: GpuFacts) -> Iterator[Finding]:
    """Yield all findings from comparing the GPUs of a host."""
    answering = [gpu for gpu in facts.gpus if gpu.error is None]
    yield from _check_visible(facts)
    yield from _check_models(answering)
    yield from _check_twins(answering)
    yield from _check_cliques(answering)
    yield from _check_nvlinks(answering)
    yield from _check_p2p(facts)


def count_visible_gpus(facts: GpuFacts) -> tuple[int | None, str]:
    """Return (number of GPUs that CUDA_VISIBLE_DEVICES leaves to this process, error in its value).

    The number is None if the value names MIG slices. CUDA accepts indices and UUID prefixes, stops at the first entry
    that matches no GPU, and uses no GPU if an entry is repeated: CUDA C++ Programming Guide, "CUDA Environment
    Variables", and torch.cuda._parse_visible_devices.
    """
    total = len(facts.gpus)
    if facts.visible is None:
        return total, ""
    if "MIG-" in facts.visible:
        return None, ""
    shown: list[int] = []
    for entry in (part.strip() for part in facts.visible.split(",")):
        index = _find_visible_index(facts, entry)
        if index is None:
            return len(shown), f"{entry!r} names no GPU of this host, and CUDA ignores what follows it" if entry else ""
        if index in shown:
            return 0, f"{entry!r} is repeated, and CUDA then uses no GPU"
        shown.append(index)
    return len(shown), ""


def _find_visible_index(facts: GpuFacts, entry: str) -> int | None:
    if number := re.match(r"\d{1,4}", entry):  # like strtol, ignores text after the digits
        return int(number[0]) if int(number[0]) < len(facts.gpus) else None
    matches = [gpu.index for gpu in facts.gpus if gpu.uuid and entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _check_visible(facts: GpuFacts) -> Iterator[Finding]:
    count, wrong = count_visible_gpus(facts)
    total = len(facts.gpus)
    if facts.granted and count is not None:
        variable, granted = facts.granted
        if total < granted or count > granted:
            which = "fewer" if total < granted else "more"
            yield finding(f"gpu.device.hidden {which}", "", visible=facts.visible, count=count, total=total,
                          granted=granted, variable=variable)  # fmt: skip
    if count is None or not total or (count == total and not wrong):
        return
    is_valid = bool(count) and not wrong
    yield finding(
        "gpu.device.hidden" + " wrong" * (not is_valid), "", visible=facts.visible, count=count, total=total,
        wrong=f": {wrong}" if wrong else "",
    )  # fmt: skip


def _check_models(gpus: list[Gpu]) -> Iterator[Finding]:
    names = Counter(gpu.name for gpu in gpus if gpu.name)
    if len(names) > 1:
        listed = ", ".join(f"{count} x {name}" for name, count in names.most_common())
        # Dense rates differ by a factor of 2 or more between generations, and little within one (hardware/gpus.toml).
        generations = {gpu.compute_capability[0] for gpu in gpus if gpu.compute_capability}
        yield finding("gpu.device.mixed", "", Status.FAIL if len(generations) > 1 else Status.WARN, what=listed)


# Fraction of the other GPUs' rate that remains, from (own value, value of the other GPUs).
_LEFT: dict[str, Callable[[float, float], float]] = {
    "ratio": lambda own, twins: own / twins,
    "generation": lambda own, twins: 2.0 ** (own - twins),  # PCI Express doubles the rate in each generation
    "power": compute_clock_share,
    "same": lambda *_: 0.95,  # RDMA can map less memory at a time; the rate is the same
}


def _check_twins(gpus: list[Gpu]) -> Iterator[Finding]:
    """Find GPUs that differ from most GPUs of their model. With two GPUs it is unknown which one is wrong: WARN."""
    for twins in _group_by_model(gpus):
        for fact, row in WORDS["twin"].items():
            values = {gpu.index: getattr(gpu, fact) for gpu in twins if getattr(gpu, fact)}
            counts = Counter(values.values())
            usual = max(counts, key=lambda value: (counts[value], value), default=0)
            for gpu in twins:
                own = values.get(gpu.index, usual)
                if usual and abs(own - usual) > row["tolerance"] * usual:
                    yield _report_twin(gpu, row, own, usual, others=counts[usual])


def _report_twin(gpu: Gpu, row: dict[str, Any], value: float, usual: float, *, others: int) -> Finding:
    share, text = min(1.0, _LEFT[row["left"]](value, usual)), row["says"]
    cost = f" {row['cost'].format(share=share)}" if value < usual else " One of them is not what it should be."
    result = finding(
        "gpu.device.mixed twin", gpu, by_loss(1.0 - share) if others > 1 and value < usual else Status.WARN,
        own=text.format(value / row["unit"]), usual=text.format(usual / row["unit"]), cost=cost,
        others=f"{others} other {gpu.name or 'GPU'}{'s have' if others > 1 else ' has'}",
        question=row["question"], remedy=WORDS["twins"][row["remedy"]],
    )  # fmt: skip
    return replace(result, code=row["code"])


def _group_by_model(gpus: list[Gpu]) -> list[list[Gpu]]:
    """Group GPUs by name. GPUs in MIG mode are left out, because MIG disables NVLink and partitions memory."""
    groups: dict[str | None, list[Gpu]] = defaultdict(list)
    for gpu in gpus:
        if not gpu.mig_enabled:
            groups[gpu.name].append(gpu)
    return list(groups.values())


def _check_cliques(gpus: list[Gpu]) -> Iterator[Finding]:
    """Find GPUs of one host in different NVLink domains, or outside the domain of the other GPUs."""
    cliques = Counter(gpu.fabric_clique for gpu in gpus if gpu.fabric_state == "completed")
    if len(cliques) > 1:
        listed = ", ".join(f"{count} in {clique or 'none'}" for clique, count in cliques.most_common())
        yield finding("gpu.fabric.split", "", what=listed)


# NVLinks ------------------------------------------------------------------------------------------------------------


def count_active_links(gpu: Gpu) -> int:
    """Count the NVLinks that are connected to a peer."""
    return sum(link.active is True for link in gpu.nvlinks)


def _check_nvlinks(gpus: list[Gpu]) -> Iterator[Finding]:
    """Compare the active NVLinks of a GPU with other GPUs of its model in this host, and with its board."""
    for twins in _group_by_model([gpu for gpu in gpus if gpu.nvlinks_known]):
        name, highest = twins[0].name, max(count_active_links(gpu) for gpu in twins)
        if highest == 0 and len(twins) > 1 and soldered(name):
            yield finding("gpu.nvlink.none", name_subject(twins), count=len(twins), name=name)
        for gpu in twins:
            unread = sum(link.active is None for link in gpu.nvlinks)
            if count_active_links(gpu) + unread < max(highest, _count_fitted_links(gpu)):
                yield _report_missing_links(gpu, highest)


def _count_fitted_links(gpu: Gpu) -> int:
    """Return the number of NVLinks on the board; 0 if none is active, because a PCIe card may have no bridge.

    The driver may omit links that failed in training. For soldered boards the number on the data sheet is the minimum.
    """
    entry = find_gpu(gpu.name) if soldered(gpu.name) else None
    of_board = entry.links if entry and entry.interconnect == "NVSwitch" else 0  # a mesh may use fewer links
    return max(len(gpu.nvlinks), of_board) if count_active_links(gpu) else 0


def _report_missing_links(gpu: Gpu, highest: int) -> Finding:
    """Report missing NVLinks relative to GPUs of the same model, or relative to the board.

    On boards with NVSwitch all links lead to the switch. With direct links, if no GPU of this model has more, a bridge
    may not be installed or a peer may not be assigned to this VM: WARN on a soldered board, INFO on a PCIe card. A PCIe
    card without any active link has no bridge, even if others have one: INFO.
    """
    active, fitted = count_active_links(gpu), max(highest, _count_fitted_links(gpu))
    down = ", ".join(str(link.link) for link in gpu.nvlinks if link.active is False)
    direct = any(link.remote_kind == "gpu" for link in gpu.nvlinks)
    alone = not active and is_card(gpu.name)
    if active == highest and not any(link.active and link.remote_kind == "nvswitch" for link in gpu.nvlinks):
        status = Status.WARN if soldered(gpu.name) else Status.INFO
    else:
        status = Status.INFO if alone else by_loss(1.0 - active / fitted)
    return finding(
        "gpu.nvlink.missing" + (" bridge" if alone else " unlisted" * (not gpu.nvlinks)), gpu, status, active=active,
        whole=fitted, down=f"links {down}" if down else "none", share=100 * active / fitted,
        replace=WORDS["nvlinks"]["direct" if direct else "switched"],
    )  # fmt: skip


# P2P ----------------------------------------------------------------------------------------------------------------


def _check_p2p(facts: GpuFacts) -> Iterator[Finding]:
    """Report one finding per reason, not per pair. A limitation by design (GeForce, partial NVLink mesh) is INFO."""
    by_index = {gpu.index: gpu for gpu in facts.gpus}
    refused: dict[tuple[str, str, bool], list[str]] = defaultdict(list)
    for pair in facts.pairs:
        if pair.p2p_read not in (None, "ok"):
            near = pair.ancestor in ("INTERNAL", "PIX", "PXB") or pair.p2p_nvlink == "ok"
            cause = _explain_by_design(pair, by_index.get(pair.a), by_index.get(pair.b))
            refused[str(pair.p2p_read), cause, near].append(f"GPU{pair.a}-GPU{pair.b}")
    for (reason, cause, near), pairs in refused.items():
        which = ", ".join(pairs[:4]) + (f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")
        evidence = f"nvmlDeviceGetP2PStatus(read) = {reason} for {len(pairs)} pairs"
        if reason == "unknown":
            yield finding("gpu.p2p.refused unknown", "", which=which, seen=evidence)
            continue
        way = "NCCL sends through GPUs that have one" if cause == _MESH else "NCCL copies through host memory there"
        remedy = WORDS["p2p"].get(reason, WORDS["p2p"]["another"])
        # P2P through host memory instead of a switch or NVLink costs 29 % of a step (docs/decisions/0020). Pairs whose
        # path crosses the CPU anyway lose less.
        yield finding(
            "gpu.p2p.refused", "", Status.INFO if cause else Status.FAIL if near else Status.WARN, which=which,
            reason=reason.replace("_", " "), why=cause, way=way, seen=evidence, remedy="" if cause else remedy,
        )  # fmt: skip


_MESH = ", which the board's mesh does not join by an NVLink"
_PRODUCT = ": this product has no P2P over PCIe"  # a vGPU has it over NVLink only (NVIDIA vGPU software user guide)


def _explain_by_design(pair: GpuPair, a: Gpu | None, b: Gpu | None) -> str:
    """Return why a pair has no P2P by design; empty if its absence is a fault or unexplained."""
    if pair.p2p_read in ("unknown", "disabled_by_regkey"):
        return ""
    if _is_outside_mesh(pair, a, b):
        return _MESH
    refused = any(gpu and (gpu.virtualization == "vgpu" or refuses_peers(gpu.name or "")) for gpu in (a, b))
    return _PRODUCT if (refused and pair.p2p_nvlink != "ok") or pair.p2p_read == "gpu_not_supported" else ""


def _is_outside_mesh(pair: GpuPair, a: Gpu | None, b: Gpu | None) -> bool:
    """Whether two GPUs have NVLinks to others but not to each other: a DGX-1 connects 16 of its 28 pairs."""
    if a is None or b is None or pair.p2p_nvlink in ("ok", None):
        return False
    ends = [{link.remote_bus_id for link in gpu.nvlinks if link.active and link.remote_kind == "gpu"} for gpu in (a, b)]
    return all(ends) and b.bus_id not in ends[0] and a.bus_id not in ends[1]


# GPUs of the bus ------------------------------------------------------------------------------------------------------


def check_bus(bus: GpuBus | None, listed: set[str], count: int, granted: int | None = None) -> Iterator[Finding]:
    """Find GPUs bound to NVIDIA's driver that NVML does not list; NVML lists `count` GPUs, at the addresses `listed`.

    `granted`: number of GPUs that Slurm allocated to the job; None outside a job. If NVML reports fewer addresses than
    GPUs (a lost GPU, or a VM that hides addresses), only the number is compared.
    """
    if bus is None:
        return
    bound = [gpu for gpu in bus.gpus if gpu.driver == "nvidia"]
    absent = [gpu for gpu in bound if gpu.bus_id not in listed]
    unplaced = max(0, count - len(listed))
    if not absent or len(absent) <= unplaced:
        return
    assigned = {gpu: _is_assigned(gpu, bus, count, granted) for gpu in absent}
    missing = [gpu for gpu in absent if assigned[gpu]]
    if len(missing) > unplaced:
        yield _report_missing(missing, bound, count, unplaced)
    if others := [gpu for gpu in absent if not assigned[gpu]]:
        yield _report_hidden(others, bound, count, bus, doubtful=None in (assigned[gpu] for gpu in others))


def _is_assigned(gpu: BusGpu, bus: GpuBus, count: int, granted: int | None) -> bool | None:
    """Return whether the GPU is assigned to this process; None if unknown.

    A GPU that a container or a device cgroup hides is not assigned.
    """
    if gpu.node_exists:
        return bool(gpu.node_usable)  # a device cgroup (Slurm, container engine) denies access to the node
    if granted is not None and granted <= count:
        return False
    if bus.container is None and bus.requested is None and not bus.all_requested:
        return True  # without a container, all GPUs of the host are assigned
    if bus.requested is not None:
        return bus.requested > count
    # The container has no node of this GPU, or the toolkit hides the GPU in /proc. Then it is assigned to another
    # container, unless there are nodes that NVML does not use, or all GPUs were requested.
    return True if bus.nodes > count else None if bus.all_requested else False


def _report_missing(gpus: list[BusGpu], bound: list[BusGpu], count: int, unplaced: int) -> Finding:
    names = ", ".join(gpu.bus_id for gpu in gpus)
    which = names if not unplaced else f"{len(gpus) - unplaced} of {names}"
    is_one = len(gpus) == 1
    seen = (f"nvmlDeviceGetCount = {count}", *map(_describe_bound, gpus[:8]))
    return finding(
        "gpu.device.missing", ", ".join(gpu.bus_id for gpu in gpus[:8]), evidence=seen, count=count, bound=len(bound),
        which=which, are="is" if is_one else "are", them="it" if is_one else "them",
    )  # fmt: skip


def _report_hidden(others: list[BusGpu], bound: list[BusGpu], count: int, bus: GpuBus, *, doubtful: bool) -> Finding:
    names = some([gpu.bus_id for gpu in others])
    place = f"this {bus.container} container" if bus.container else "this process"
    # if no GPU is visible, nothing was read and the state of the GPUs is unknown
    is_known = bool(count) and not doubtful
    doubt = " NVIDIA_VISIBLE_DEVICES=all requests them. Whether the driver or another container has them is unknown."
    return finding(
        "gpu.device.not_given" + " unknown" * (not is_known), ", ".join(gpu.bus_id for gpu in others[:8]),
        evidence=tuple(map(_describe_bound, others[:8])),
        count=len(others), bound=len(bound), place=place, names=names, why=doubt if doubtful else "",
    )  # fmt: skip


def _describe_bound(gpu: BusGpu) -> str:
    logged = f"kernel log: Xid {', '.join(map(str, gpu.xids))}; " if gpu.xids else ""
    bound = f"{logged}{DEVICES}/{gpu.bus_id}/driver: nvidia; "
    if gpu.minor is None:
        return f"{bound}{PROC}/{gpu.bus_id}: not there"
    if not gpu.node_exists:
        return f"{bound}/dev/nvidia{gpu.minor}: not there"
    return f"{bound}/dev/nvidia{gpu.minor}: {'can be opened' if gpu.node_usable else 'may not be opened'}"
