"""The recommended environment of a job and other needs of its pods; formats settings for other tools.

The rules here are about GPUs, their links and CPU cores. Most variables have correct defaults, and a note says not to
set them. Specification: NCCL docs/userguide/source/{env,troubleshooting}.rst (shared memory, memlock),
src/graph/{topo,paths}.cc, src/mnnvl.cc; PyTorch docs notes/cuda (allocator), torch/distributed/run.py; Kubernetes
EnvVar and extended resources; Multus annotation k8s.v1.cni.cncf.io/networks; AWS EKS user guide, EFA; docker run
--env-file (one NAME=value per line, no quoting); POSIX shell.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from hardware.gpus import find_gpu
from hardware.machines import catalogue, machines
from hardware.units import some
from planner.advice import Recommendation
from planner.nccl_env import devices, rdma
from planner.nccl_env.devices import choose_ports, is_virtual_function
from planner.nccl_env.situation import (
    RDMA_KINDS,
    NodeView,
    Note,
    Setting,
    Situation,
    by_host,
    find_cloud,
    list_published,
    note,
    recognise,
    setting,
)
from probes.gpu.facts import GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.limits.probe import LimitsFacts
from probes.pci.facts import UNSUPPORTED, PciFacts


class RenderError(ValueError):
    """The format cannot represent a setting; the message names the setting."""


FORMATS = ("env", "shell", "k8s")


def render_settings(settings: Sequence[Setting], form: str, notes: Sequence[Note] = ()) -> str:
    """Format settings in one of FORMATS, with their reasons and notes on the platform as comments. Raises RenderError.

    These are an env file (unquoted, as `docker run --env-file` reads it), export commands for a POSIX shell, and the
    `env:` list of a container as YAML, in which every value is a string, even if it looks like a number.
    """
    for each in settings:
        if any(mark in each.value for mark in "\n\r\0"):
            raise RenderError(f"{each.name}: the value {each.value!r} has a line break, which no env file can carry")
    lines = [f"# {note.text}" for note in notes if note.topic == "platform"]
    if form == "k8s":
        import yaml

        rows = [{"name": each.name, "value": each.value} for each in settings]
        return "\n".join([*lines, yaml.safe_dump(rows, sort_keys=False, allow_unicode=True, width=10_000)])
    for each in settings:
        value = f"export {each.name}={shlex.quote(each.value)}" if form == "shell" else f"{each.name}={each.value}"
        lines += [f"# {each.reason.rule}", value]
    return "\n".join(text.replace("\n", " ") for text in lines or ("# nothing to set",)) + "\n"


def unread(case: Situation) -> Note | None:
    """Report GPUs that could not be read, so the advice is based on fewer facts."""
    failed = case.unread("gpu")
    return note("gpu.unread", failed) if failed else None


def note_unsupported(case: Situation) -> Note | None:
    """Report AMD GPUs and Gaudi: for RCCL and HCCL, NCCL's variables have another meaning or none."""
    if not case.unsupported:
        return None
    kind, library = UNSUPPORTED[case.backend], case.backend.upper()
    gpus = {node.hostname: node.unsupported_gpus() for node in case.nodes}
    evidence = by_host((host, f"{len(places)} {kind} ({places[0]})") for host, places in gpus.items() if places)
    how = "seen (PCI class and vendor)" if any(node.snapshot for node in case.nodes) else "of the catalogue"
    platform = next((row.name for node in case.nodes if (row := recognise(node)) is not None and row.amd), "")
    extra = ["rccl.published"] * bool(platform)
    return note("rccl.not_judged", evidence, *extra, how=how, platform=platform, gpus=kind, library=library)


def vendor_script(case: Situation) -> Note | None:
    """Report a platform whose vendor's plugin has its own environment, which must not be overridden."""
    for node in case.nodes:
        row = recognise(node)
        if row is None or not row.plugin:
            continue
        info = node.facts(HostinfoFacts)
        there = next((path for path in row.script if info and path in info.vendor_files), None)
        listed = " ".join(f"{name}={value}" for name, (value, _) in row.values().items())
        if not row.script:
            how = f"set the variables that Google publishes with the installer of the {row.plugin} plugin"
        elif there or info is None:
            how = f"source {there or row.script[0]} in the job's command"
        else:
            how = f"install the {row.plugin} plugin and source its script, {row.script[0]}: it is not on this disk"
        evidence = f"{node.hostname}: {row.name}; {row.recipes[0].source}"
        return note("platform.vendor_script", evidence, how=how, listed=listed)
    return None


def published_values(case: Situation) -> Note | None:
    """List published values that only a scan shows to be needed, for a platform of which no node was read."""
    for node in case.nodes:
        row = recognise(node)
        is_unread = node.facts(HostinfoFacts) is None
        if row and is_unread and not (row.plugin or row.amd or case.efa):
            left = [f"{name}={value}" for name, (value, recipe) in row.values().items() if name not in recipe.set]
            return note("platform.published", platform=row.name, listed=" ".join(left)) if left else None
    return None


def unknown_platform(case: Situation) -> Note | None:
    """Report a cloud machine that is not in the table: its provider may publish settings that probes cannot see."""
    if any(recognise(node) for node in case.nodes):
        return None
    for node in case.nodes:
        info = node.facts(HostinfoFacts)
        cloud = find_cloud(info) if info else None
        if info is None or not (cloud or info.virtual_machine):
            continue
        machine = f"{cloud[1]}, {cloud[2]}" if cloud else info.virtual_machine
        return note("platform.unknown", f"{node.hostname}: {machine}")
    return None


def slingshot_protocol(case: Situation) -> Setting | Note | None:
    """NCCL_PROTO for Slingshot with Grace Hopper: LL128 over GPUDirect produced wrong data there."""
    if not case.cxi or case.older_than((2, 27, 0)):
        return None
    for node in case.nodes:
        if (facts := node.facts(GpuFacts)) and any(gpu.c2c_links for gpu in facts.gpus):
            evidence = f"{node.hostname}: C2C links, {len(_list_cassini(case))} Cassini NICs"
            return setting("proto.slingshot", "^LL128", evidence)
    return None


def slingshot_tuning(case: Situation) -> Note | None:
    """Report settings on which sites with Slingshot disagree."""
    if not case.cxi:
        return None
    return note("cxi.sites_differ", f"{case.nodes[0].hostname}: {', '.join(_list_cassini(case)[:8])}")


def _list_cassini(case: Situation) -> tuple[str, ...]:
    return next((nics for node in case.nodes if (nics := node.cxi())), ())


def find_nvlink_between(case: Situation) -> str | None:
    """Return the evidence that NVLink connects nodes of this job (MNNVL); None if there is none."""
    if case.one_node:
        return None
    cliques: Counter[str] = Counter()
    for node in case.nodes:
        facts = node.facts(GpuFacts)
        cliques.update(sorted({gpu.fabric_clique for gpu in facts.gpus if gpu.fabric_clique} if facts else ()))
    is_tray = all(0 < node.gpu_count() <= 4 for node in case.nodes)  # of an NVLink domain (GB200 NVL72); HGX has 8
    shared = [clique for clique, hosts in cliques.items() if hosts > 1 or is_tray]
    if shared:
        return f"fabric clique {shared[0]} on {cliques[shared[0]]} host(s)"
    racks = {row.name for row in catalogue() if row.nvlink_nodes > 1}
    planned = [node for node in case.nodes if not node.snapshot and node.topology and node.topology.sku in racks]
    return f"{planned[0].hostname}: catalogue" if planned else None


def mnnvl(case: Situation) -> Note | None:
    """NCCL_MNNVL_ENABLE: enabled automatically, but requires IMEX."""
    evidence = find_nvlink_between(case)
    return note("mnnvl", evidence) if evidence else None


def topo_file(case: Situation) -> Setting | Note | None:
    """NCCL_TOPO_FILE: a VM that hides the PCIe tree needs the file of its provider."""
    topic = "NCCL_TOPO_FILE"
    for node in case.nodes:
        pci = node.facts(PciFacts)
        virtual = (node.topology.virtual if node.topology else None) or (pci.virtual_tree if pci else None)
        if virtual is None or node.gpu_count() < 2:
            continue
        info = node.facts(HostinfoFacts)
        evidence = f"{node.hostname}: {virtual}"
        configured = (info.nccl_conf or {}).get(topic) if info else None
        if configured:
            return note("topo_file.nccl_conf", f"{evidence}; nccl.conf: {topic}={configured}")
        if case.efa:
            return note("topo_file.efa", evidence)
        files = pci.topology_files if pci else ()
        if path := _find_azure_file(node, files):
            return setting("topo_file.azure", path, f"{evidence}; {path} is there")
        if pci and pci.topology_file:
            return note("topo_file.topologyd", f"{evidence}; {pci.topology_file}")
        models = {model.name.lower() for name in node.gpu_names() if (model := find_gpu(name))}
        fitting = [path for path in files if any(model in path.rpartition("/")[2] for model in models)]
        if len(fitting) == 1:
            return setting("topo_file.provider", fitting[0], f"{evidence}; {fitting[0]} is there")
        return note("topo_file.choose" if fitting else "topo_file.absent", evidence, files=some(fitting))
    return None


def _find_azure_file(node: NodeView, files: Sequence[str]) -> str | None:
    """Return the existing file of this VM series; Azure's HPC images name it in /etc/nccl.conf."""
    models = [find_gpu(name) for name in node.gpu_names()]
    with_file = (row for row in machines() if row.topology_file)
    series = next((row.topology_file for row in with_file if find_gpu(row.gpu) in models), None)
    paths = (f"/opt/microsoft/{series}/topo.xml", f"/opt/microsoft/{series}-topo.xml")
    return next((path for path in paths if path in files), None)


def allocator(case: Situation) -> Setting | None:
    """PYTORCH_CUDA_ALLOC_CONF: expandable segments, so that varying sequence lengths do not fragment the memory."""
    if not case.gpus:
        return None
    evidence = f"{case.gpus} CUDA GPUs; newer PyTorch also reads it as PYTORCH_ALLOC_CONF"
    return setting("allocator", "expandable_segments:True", evidence)


def omp_threads(case: Situation) -> Setting | None:
    """OMP_NUM_THREADS: torchrun sets it to 1 if several ranks share a node, and does not set it for a single rank.

    One thread is enough for a rank that computes on a GPU. What offloading gains from more, the forecast says.
    """
    counts = [found for node in case.nodes if not case.unsupported and (found := _count_threads(case, node))]
    if not counts:
        return None
    threads, ranks, quota, evidence = min(counts, key=lambda count: count[0])
    if ranks == 1:
        return setting("omp.limited", str(threads), evidence) if case.backend == "gloo" or quota else None
    return setting("omp.cpu", str(threads), evidence, ranks=ranks) if case.backend == "gloo" and threads > 1 else None


def _count_threads(case: Situation, node: NodeView) -> tuple[int, int, float | None, str] | None:
    """Return the CPU cores of a rank, the ranks, and the CPU limit of the job's cgroup if it is below the node's cores.

    The last value is the evidence. None: the node's cores are unknown.
    """
    info, limits, ranks = node.facts(HostinfoFacts), node.facts(LimitsFacts), case.ranks_on(node)
    cores = info.cores or info.threads if info else None
    if cores is None:
        return None
    quota = limits.cgroup_cpus if limits and not limits.of_agent else None  # the agent's CPU limit does not limit jobs
    quota = quota if quota and quota < cores else None
    evidence = f"{cores} cores{f', {quota:g} by cgroup' if quota else ''}, {ranks} rank{'s' if ranks > 1 else ''}"
    return max((int(quota) if quota else cores) // ranks, 1), ranks, quota, evidence


# NCCL's troubleshooting page starts containers with --shm-size=1g. DataLoader workers pass batches through the same
# file system, one set per rank. A memory-backed emptyDir uses only as much memory as is written to it.
_SHM_BYTES_PER_RANK = 1024**3

# AWS EKS user guide, "Run machine learning training with EFA": the example pods request 5120Mi of 2 MiB pages.
_EFA_HUGEPAGES = "hugepages-2Mi: 5120Mi"


def _list_needs(case: Situation) -> Iterator[Setting]:
    """Yield the needs of a pod of this job."""
    if not case.nodes:
        return
    largest = max(case.nodes, key=lambda node: node.gpu_count())
    yield _need_shm(largest, case.ranks_on(largest))
    if case.gpus:
        count = largest.gpu_count()
        yield setting("pod.gpus", f"nvidia.com/gpu: {count}", f"{largest.hostname}: {count} GPUs")
    if case.one_node:
        return
    if joined := find_nvlink_between(case):
        yield setting("pod.compute_domain", "resource.nvidia.com/v1beta1", joined)
    planned = (nic.kind for node in case.nodes if not node.snapshot for nic in node.nics)
    if case.rdma_ports or case.efa or case.cxi or set(planned) & set(RDMA_KINDS):
        yield setting("pod.memlock", "unlimited", _describe_memlock(case))
        yield setting("pod.ipc_lock", "IPC_LOCK", _describe_memlock(case))
    if case.efa:
        yield from _need_efa(case)
    for node in case.nodes:
        yield from _need_roce(node)


def _need_shm(node: NodeView, ranks: int) -> Setting:
    limits = node.facts(LimitsFacts)
    have = limits.shm_size_bytes if limits and not limits.of_agent else None
    evidence = f"{node.hostname}: {ranks} ranks"
    if have is not None and limits is not None:
        evidence += f"; /dev/shm of {limits.whose}: {have / 2**20:.0f} MiB"
    users = "NCCL and DataLoader workers pass" if node.gpu_count() else "DataLoader workers pass"
    return setting("pod.shm", str(ranks * _SHM_BYTES_PER_RANK), evidence, users=users)


def _describe_memlock(case: Situation) -> str:
    for node in case.nodes:
        limits = node.facts(LimitsFacts)
        if limits is None or not limits.memlock_known:
            continue
        soft = limits.memlock_soft_bytes
        text = "unlimited" if soft is None else f"{soft} bytes"
        return f"{node.hostname}: memlock of {limits.whose} is {text}; the job's pod may get another"
    return "memlock was not read"


def _need_efa(case: Situation) -> Iterator[Setting]:
    node = max(case.nodes, key=lambda each: each.efa_count())
    devices, gpus, ranks = node.efa_count(), node.gpu_count(), case.ranks_on(node)
    part = ranks < gpus  # pods on the other GPUs need theirs
    evidence = f"{node.hostname}: {devices} EFA devices" + (f", for {ranks} of {gpus} GPUs" if part else "")
    yield setting("pod.efa", f"vpc.amazonaws.com/efa: {-(-devices * ranks // gpus) if part else devices}", evidence)
    limits = node.facts(LimitsFacts)
    pages = ", ".join(f"{size}: {number}" for size, number in (limits.hugepages or {}).items()) if limits else ""
    yield setting("pod.hugepages", _EFA_HUGEPAGES, f"{node.hostname}: {pages or 'huge pages were not read'}")


def _need_roce(node: NodeView) -> Iterator[Setting]:
    """Return the secondary network and the RDMA resource that belongs to it."""
    choice = choose_ports(node)
    for interface in node.links:
        if interface.role == "secondary" and interface.multus_network:
            evidence = f"{node.hostname}: {interface.name} is on {interface.multus_network}"
            yield setting("pod.network", interface.multus_network, evidence)
    if choice.secondary:
        devices = ", ".join(f"{device} ({interface})" for device, interface in choice.secondary.items())
        functions = sum(is_virtual_function(view) for view in choice.chosen)
        extra = ["pod.virtual_functions"] if functions else []
        yield setting("pod.rdma", f"rdma/*: {functions or 1}", f"{node.hostname}: {devices}", *extra)


_FIRST = (unread, note_unsupported, devices.gloo_socket_ifname)  # for every job
_BETWEEN_NODES = (  # only for NCCL jobs on several nodes
    vendor_script, published_values, unknown_platform, devices.socket_ifname, rdma.ib_hca,
    rdma.ib_gid_index, rdma.ib_addr_family, rdma.ib_roce_version, rdma.ib_traffic_class, rdma.ib_service_level,
    rdma.cross_nic, rdma.net_plugin, slingshot_protocol, slingshot_tuning,
)  # fmt: skip
_LAST = (topo_file, mnnvl, allocator, omp_threads)  # for every job
RULES: tuple[Callable[[Situation], Setting | Note | None], ...] = (*_FIRST, *_BETWEEN_NODES, *_LAST)
"""Rules, in the order of their answers."""


def settings(case: Situation) -> Recommendation:
    """Return the recommended environment of a job."""
    between = case.backend == "nccl" and not case.one_node
    rules = RULES if between else (*_FIRST, *_LAST)
    answers = [answer for rule in rules if (answer := rule(case)) is not None]
    chosen = [answer for answer in answers if isinstance(answer, Setting)]
    notes = [answer for answer in answers if isinstance(answer, Note)]
    if between:  # published values replace notes about the same variables
        names = {each.name for each in chosen}
        added = [each for each in list_published(case).values() if each.name not in names]
        replaced = {each.name for each in added}
        chosen, notes = chosen + added, [each for each in notes if each.topic not in replaced]
    if vendor_script(case) is not None:  # the script or its plugin sets NCCL's variables
        chosen = [each for each in chosen if not each.name.startswith("NCCL_")]
        if between:
            notes = [each for each in notes if not each.topic.startswith("NCCL_") or each.topic == "NCCL_MNNVL_ENABLE"]
    unknown = any(each.text.startswith("Unknown") or each.topic == "platform" for each in notes)
    if case.backend == "nccl" and not unknown and not any(each.name.startswith("NCCL_") for each in chosen):
        notes = [note("nccl.nothing"), *notes]
    needs: dict[tuple[str, str], Setting] = {}
    for each in _list_needs(case):
        needs.setdefault((each.name, each.value), each)
    return Recommendation(settings=tuple(chosen), notes=tuple(notes), needs=tuple(needs.values()), backend=case.backend)
