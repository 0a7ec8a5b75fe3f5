"""Problems of a log: those its messages name, and those that only the whole shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from collectives.nccl_log.codes import CODES, WORDS_OF, codes_with, problem_of
from collectives.nccl_log.ledger import Ledger
from collectives.nccl_log.messages import MAX_PLACES, Facts, gpus_are, gpus_before_ampere
from collectives.nccl_log.transport import ChannelCount, Evidence, LogProblem, ProofLine, by_severity, rank_words

_LEVEL = re.compile(rf"(?:{'|'.join(sorted(WORDS_OF['levels']))}|\d+)(?![A-Za-z])")  # a torn line may go on behind it
_LEVEL_NAMES = ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL", "NCCL_NET_MERGE_LEVEL")

_OFF_BY_DEFAULT = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
_WITHIN_NODE = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE")

# The most GPUs that one operating system was seen to hold under NCCL (DGX-2, p2.16xlarge, HGX H20 of 16).
MOST_GPUS_OF_A_NODE = 16


def single_node(ledger: Ledger) -> bool | None:
    """Whether all ranks sit in one node; None where the log does not say."""
    facts = ledger.facts
    if facts.nodes:
        return facts.nodes == 1 and not facts.mnnvl
    listed = set(facts.test_ranks.values())
    elsewhere = bool(listed and ledger.hosts) and listed.isdisjoint(ledger.hosts)
    if ledger.host_count() > 1 or len(listed) > 1 or elsewhere:
        return False
    if facts.test_on_one_host or facts.all_on_one_host():
        return True
    return False if _more_ranks_than_a_node(ledger) else None


def _more_ranks_than_a_node(ledger: Ledger) -> bool:
    """Whether there are ranks that cannot sit beside the devices seen: a GPU holds one rank of a communicator."""
    facts = ledger.facts
    seen = facts.rank_devices()
    highest = max((rank for rank, _ in seen), default=-1)
    if max(facts.ranks, highest + 1) > MOST_GPUS_OF_A_NODE:
        return True
    # Bus numbers have four digits and more; devices of NVML one or two.
    devices = [int(device) for _, device in seen if len(device) < 3 and device.isdigit()]
    return bool(devices) and len(devices) == len(seen) and max(devices) < 8 <= max(highest, facts.ranks - 1)


def missing_ranks(ledger: Ledger) -> tuple[int, ...]:
    """Ranks of the job that no line shows; a log of one worker alone does not show what connects the nodes.

    Ranks are counted from 0, so what lies below the lowest that was seen is missing; what lies above the highest is
    only where a line states how many ranks there are.
    """
    facts = ledger.facts
    seen = {rank for rank, _ in facts.rank_devices()} | facts.rank_places.keys() | facts.test_ranks.keys()
    if not seen or single_node(ledger) is not None:
        return ()
    end = min(facts.ranks, max(seen) + 1 + MOST_GPUS_OF_A_NODE)
    return (*range(min(seen)), *range(max(seen) + 1, end))


def _silent_nodes(facts: Facts) -> tuple[int, ...]:
    """Ranks of nodes of which no log was read; the log of rank 0 alone is what most frameworks write for all.

    Between the lowest and the highest rank that was seen, a rank may be missing because its line was torn: there only
    nodes without any rank count. Nodes are taken to hold as many ranks as the host that shows most.
    """
    seen = facts.rank_places.keys()
    if not seen or (len(seen) == 1 and 0 in seen) or len(seen) >= MAX_PLACES:
        return ()
    of_a_node = max(Counter(host for host, _ in facts.rank_places.values()).values())
    nodes, least, most = {rank // of_a_node for rank in seen}, min(seen), max(seen)
    return tuple(rank for rank in range(facts.places_of) if not least <= rank <= most or rank // of_a_node not in nodes)


def layers_in_use(ledger: Ledger) -> set[str]:
    """Link layers of the devices that carry channels; of all that NCCL lists where that is unknown."""
    layers = ledger.facts.layers
    used = {device for name, device in ledger.count_wires("network", "device") if name.startswith(("IB", "gIB"))}
    carrying = [(device, layer) for device, layer in layers if device in used]
    every_one_is_known = sorted(device for device, _ in carrying) == sorted(used)  # once each
    return {layer for _, layer in (carrying if used and every_one_is_known else layers)}


class _Findings:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.found: dict[str, LogProblem] = {}
        self.names = ledger.whole_names()

    def add(
        self, code: str, detail: str = "", lines: tuple[ProofLine, ...] = (), count: int = 0, severity: str = "",
        hosts: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Add a problem once: on `hosts`, else where its messages, or the lines that prove it, were written."""
        if code in self.found:
            return
        proof = lines or tuple(self.ledger.code_lines.get(code, ()))
        writers = self.ledger.writers_of(code) if not hosts else ()
        hosts = hosts or self._named(writer.host for writer in writers) or self._named(row.host for row in proof)
        ranks = (
            self.ledger.ranks_of(writers)
            if writers
            else tuple(sorted({rank for host in hosts for rank in self.ledger.ranks_on(host)}))
        )
        own = {name: value for name, value in (("severity", severity), ("action", self._action(code, proof))) if value}
        self.found[code] = problem_of(
            code, detail, lines=self._of_hosts(proof, hosts), count=count or self.ledger.codes[code] or 1,
            hosts=tuple(sorted(hosts)), ranks=ranks, **own,
        )  # fmt: skip

    def _action(self, code: str, proof: tuple[ProofLine, ...]) -> str:
        """Return the first action for what the log shows; empty if none of the code's cases is there."""
        facts = self.ledger.facts
        seen = [row.text for row in proof] + [f"{port}/{layer}" for (_, port), layer in facts.ports.items()]
        seen += [f"NCCL {version}" for version in facts.versions] + [f"provider {name}" for name in facts.providers]
        seen += [f"GPUDirect RDMA {word}" for _, word in facts.gdr_words]
        return next((case["action"] for case in CODES[code].cases if re.search(case["seen"], "\n".join(seen))), "")

    def _named(self, hosts: Iterable[str]) -> tuple[str, ...]:
        """The hosts by their whole names, each once."""
        return tuple(dict.fromkeys(self.names.get(host, host) for host in hosts if host))

    def _of_hosts(self, rows: tuple[ProofLine, ...], hosts: Collection[str]) -> tuple[ProofLine, ...]:
        """One line of each of the first four of these hosts, two of a single one; of all where none is theirs."""
        mine = tuple(row for row in rows if set(self._named([row.host])) & set(hosts)) or rows
        firsts = tuple(row for at, row in enumerate(mine) if all(row.host != other.host for other in mine[:at]))
        return firsts[:4] if len(firsts) > 1 else mine[:2]

    def proof(self, *starts: str) -> tuple[ProofLine, ...]:
        """Lines that prove facts with these beginnings: the first few, and one of each further host."""
        rows = [row for fact, rows in self.ledger.proof.items() if fact.startswith(starts) for row in rows]
        return tuple(sorted(rows, key=lambda row: row.line))

    def hosts_without_gdrdma(self) -> tuple[str, ...]:
        """Hosts with channels over RDMA of which none has GPUDirect RDMA."""
        rows: dict[str, ChannelCount] = {}
        for (host, network), count in self.ledger.count_wires("host", "network").items():
            if network != "Socket":
                rows[host] = rows.get(host, ChannelCount()) + count
        return tuple(host for host, count in rows.items() if host and not count.gdrdma)

    def hosts_over(self, network: str) -> tuple[str, ...]:
        """Return the hosts with channels over this network."""
        return tuple(host for host, name in self.ledger.count_wires("host", "network") if host and name == network)

    def variable_proof(self, *variables: str) -> tuple[ProofLine, ...]:
        """The lines that report these environment variables."""
        lines = self.ledger.variable_lines
        return tuple(lines[name] for name in variables if name in lines)[:3]


def find(
    ledger: Ledger, evidence: Evidence, *, ports: Collection[str] | None
) -> tuple[tuple[LogProblem, ...], tuple[LogProblem, ...]]:
    """Problems, and notes: what was seen and is no problem here."""
    found = _Findings(ledger)
    for code in ledger.codes:
        _add_code(found, code)
    notes: list[LogProblem] = []
    _explain_messages(found, ledger, evidence, notes)
    _network(found, ledger, evidence)
    _gdr(found, evidence, ledger)
    _within_node(found, evidence)
    _ports(found, ledger, ports)
    _environment(found, evidence, notes)
    _nothing_seen(found, evidence, notes)
    reasons = by_severity(found.found[code] for code in codes_with("no_rdma") if code in found.found)
    if reasons and "socket_fallback" in found.found:
        action = f"The log names the reason ({reasons[0].code}). {reasons[0].action}"
        found.found["socket_fallback"] = replace(found.found["socket_fallback"], action=action)
    # A CUDA error or a missing tag says what is wrong; what names the reason comes before it.
    ranked = by_severity(sorted(found.found.values(), key=lambda each: CODES[each.code].symptom))
    return ranked, tuple(notes)


def _add_code(found: _Findings, code: str) -> None:
    """A code found in messages, in the words of the provider that libfabric chose."""
    provider = found.ledger.facts.provider or "efa"
    if provider.startswith("efa") or not CODES[code].other_provider:
        found.add(code)
        return
    other = CODES[code].other_provider
    if other == "libfabric_request_failed" and provider == "cxi":
        other = "slingshot_request_failed"
    lines, count = tuple(found.ledger.code_lines.get(code, ())), found.ledger.codes[code]
    found.add(other, detail=f"provider {provider}", lines=lines, count=count)


def _demote(found: _Findings, code: str, notes: list[LogProblem]) -> None:
    if code in found.found:
        notes.append(found.found.pop(code))


def _explain_messages(found: _Findings, ledger: Ledger, evidence: Evidence, notes: list[LogProblem]) -> None:
    """Follow-on errors and noise are no problems of their own where the first cause is there."""
    _demote(found, "other_warnings", notes)
    if evidence.inter_node_transport is None:
        # One node needs no RDMA library.
        _demote(found, "libibverbs_missing", notes)
    elif "libibverbs_missing" in found.found and _if_several(ledger, evidence)[1]:
        found.found["libibverbs_missing"] = replace(found.found["libibverbs_missing"], severity="warn")
    if any(problem.severity == "fail" for problem in found.found.values()):
        for code in codes_with("follows"):
            _demote(found, code, notes)
    elif not ledger.facts.finished:
        for code in found.found.keys() & codes_with("alone"):
            found.found[code] = replace(found.found[code], severity="fail", action=CODES[code].alone)
    if "Libfabric" in (evidence.inter_node_transport or "") and (evidence.transports or ledger.facts.provider):
        # One protocol of the plugin failed and another was chosen.
        for code in ("efa_plugin_init_failed", "no_efa_provider", "libfabric_plugin_failed"):
            _demote(found, code, notes)
    _demote(found, "pxn_disabled_plugin", notes)
    _demote(found, "sharp_init_failed", notes)  # the channels that NCCL then makes are judged as any others
    for code in ("python_traceback", "gpu_out_of_memory", "cuda_failure", "nvls_bind_failed", "port_in_use",
                 "efa_memory_not_registered"):  # fmt: skip
        if ledger.outlived(code):
            _demote(found, code, notes)  # caught: the job finished
    for code in codes_with("of_a_step"):
        if ledger.outlived(code, before_nccl=True):
            _demote(found, code, notes)  # of an earlier step of the job
    for code in sorted(codes_with("vague"), key=lambda code: -CODES[code].vague):
        if any(problem.severity == "fail" for other, problem in found.found.items() if other != code):
            _demote(found, code, notes)
    if layers_in_use(ledger) == {"IB"}:
        _demote(found, "gid_index_invalid", notes)


def _network(found: _Findings, ledger: Ledger, evidence: Evidence) -> None:
    inter, facts = evidence.inter_node_transport, ledger.facts
    if inter == "Socket":
        unsure, severity = _if_several(ledger, evidence)
        found.add(
            "socket_fallback",
            detail=unsure,
            lines=found.proof("NET/Socket", "network Socket", "socket inter"),
            severity=severity,
            hosts=found.hosts_over("Socket"),
        )
    one_node = facts.nodes == 1 or facts.test_on_one_host or facts.all_on_one_host()
    absent = facts.counts["no RDMA device"]
    if absent and not one_node and (inter in (None, "Socket", "unknown")):
        found.add("no_ib_device", lines=found.proof("no RDMA device"), count=absent)
    chosen = facts.networks.keys() | ledger.networks().keys()
    if "Socket" in chosen and len(chosen) > 1 and not one_node:
        on = {name: ", ".join(sorted(found.hosts_over(name))[:4]) for name in sorted(chosen)}
        detail = "; ".join(f"{name} on {hosts}" if hosts else name for name, hosts in on.items())
        odd = found.hosts_over("Socket") or found._named(row.host for row in found.proof("network Socket"))
        found.add("mixed_networks", detail=detail, lines=found.proof("network "), hosts=odd)
    if inter is not None and len(layers_in_use(ledger)) > 1:
        found.add("mixed_link_layers", detail=", ".join(evidence.hcas), lines=found.proof("RDMA devices in use"))
    suspects = [
        name for name in (*facts.bootstrap, *facts.sockets) if name == "lo" or name.startswith(WORDS_OF["bridges"])
    ]
    first = [*list(facts.bootstrap)[:1], *list(facts.sockets)[:1]]
    # Within a node the loopback interface does.
    apart = (facts.nodes or ledger.host_count()) > 1 or inter != "unknown"
    if inter is not None and any(name in suspects and (apart or name != "lo") for name in first):
        found.add(
            "docker_interface_used",
            detail=", ".join(dict.fromkeys(suspects)),
            lines=found.proof("socket inter", "interface of"),
        )


def _if_several(ledger: Ledger, evidence: Evidence) -> tuple[str, str]:
    """What is to be added where NCCL chose sockets, no channel took them, and nothing shows a second node; or ""."""
    shown = (
        single_node(ledger) is False or evidence.torn_lines or any(t.startswith("NET/") for t in evidence.transports)
    )
    return ("", "") if shown else ("if the job has several: the log shows one host and no channel", "warn")


def _gdr(found: _Findings, evidence: Evidence, ledger: Ledger) -> None:
    state, inter = evidence.gdrdma, evidence.inter_node_transport or ""
    facts = ledger.facts
    carried = list(ledger.networks()) or [evidence.network or ""]
    within = (
        not inter and evidence.send.total + evidence.receive.total > 0
    )  # of one host's channels: a matter of its own
    if state in ("off", "partial") and not within and gpus_are("without GPUDirect RDMA", evidence.gpus):
        lines = found.proof("GPU ") + _channel_proof(found)
        found.add("gdr_not_supported_by_gpu", detail=", ".join(evidence.gpus), lines=lines)
        return
    if state == "partial":
        _gdr_partial(found, evidence, facts)
    if one_direction(evidence):
        found.add("one_direction_seen", detail=_part(evidence, []), lines=found.proof("NET/"))
    if state == "off" and "Socket" not in carried and not within:
        _gdr_off(found, evidence, facts, carried)
    refused = {enabled for name, enabled in facts.gdr_hca if "Libfabric" in name}
    if refused == {False} and evidence.gdrdma_fraction is None:
        found.add("gdr_refused_by_plugin", lines=found.proof("GPUDirect RDMA refused"))
    _distance(found, evidence, carried, state)
    if evidence.torn_lines and state == "none":
        found.add(
            "torn_channel_lines",
            detail=f"{evidence.torn_lines} lines",
            lines=found.proof("cut "),
            count=evidence.torn_lines,
        )


def one_direction(evidence: Evidence) -> bool:
    """Whether GPUDirect RDMA was seen on sends alone or on receives alone.

    Every channel is printed by its sender and by its receiver: where one half is missing, so are logs, and NCCL
    decides on GPUDirect RDMA for each direction apart (NCCL_NET_GDR_READ is of sends).
    """
    return (
        evidence.gdrdma == "on"
        and evidence.inter_node_transport is not None
        and not evidence.undirected.total
        and bool(evidence.send.total) != bool(evidence.receive.total)
    )


def _gdr_partial(found: _Findings, evidence: Evidence, facts: Facts) -> None:
    sockets = found.ledger.networks().get("Socket", ChannelCount()).total
    missing = sum(seen.total - seen.gdrdma for seen in (evidence.send, evidence.receive, evidence.undirected))
    if sockets and missing <= sockets:  # sockets cannot have it: ranks that use sockets are reported as mixed networks
        return
    code = "gdr_partial" if sockets else _partial(evidence, facts)
    hosts = found.hosts_without_gdrdma() if code == "gdr_partial" else ()
    lacking = [name for name, n in evidence.devices.items() if n.gdrdma < n.total and name.split(" ")[0] not in hosts]
    far = [path for path in evidence.gdr_paths if path.startswith("disabled")]
    detail = _part(evidence, lacking) + (f"; {'; '.join(far[:3])}" if far and code == "gdr_partial" else "")
    severity = ""
    if code == "gdr_read_disabled_pre_ampere" and not evidence.gpus:
        detail += "; the log names no GPU, so this conclusion rests on the direction alone, and no line contradicts it"
        severity = "warn"  # not proven: a look at the GPU's name settles it
    elif code == "gdr_read_disabled_pre_ampere" and not gpus_before_ampere(evidence.gpus):
        detail += "; before 2.19 NCCL did so for every GPU without NVLink"
    lines = _channel_proof(found) + found.proof("GPUDirect RDMA too far")
    if hosts:
        detail = f"none on {', '.join(hosts[:4])}{' and others' if len(hosts) > 4 else ''}; in total {detail}"
    found.add(code, detail=detail, lines=lines, severity=severity, hosts=hosts)
    refused = [host for host in hosts if facts.gdr_words_of(host) & {"refused", "usable"} == {"refused"}]
    if refused:
        found.add("peermem_missing", lines=found.proof("GPUDirect RDMA refused"), hosts=refused)


def _gdr_off(found: _Findings, evidence: Evidence, facts: Facts, carried: list[str]) -> None:
    env, inter = evidence.environment, evidence.inter_node_transport or ""
    is_ib = any(name.startswith(("IB", "gIB")) for name in carried) or inter.startswith("IB")
    code = "ib_without_gdrdma" if is_ib else _without_gdrdma(inter, carried, facts.provider)
    if evidence.gdrdma_fraction is not None:  # else no channel was seen, and what refused it is reported below
        lines, hosts = _channel_proof(found), found.hosts_without_gdrdma()
        found.add(code, detail=_part(evidence, []), lines=lines, hosts=hosts)
        found.found.pop("gdr_refused_by_plugin", None)
    if env.get("NCCL_NET_GDR_LEVEL") in ("LOC", "0") or env.get("NCCL_IB_CUDA_SUPPORT") == "0":
        found.add("gdr_disabled_by_env", lines=found.variable_proof("NCCL_NET_GDR_LEVEL", "NCCL_IB_CUDA_SUPPORT"))
    elif is_ib and {enabled for name, enabled in facts.gdr_hca if name != "Socket"} == {False}:
        found.add("peermem_missing", lines=found.proof("GPUDirect RDMA refused"))


def _without_gdrdma(inter: str, carried: list[str], provider: str | None) -> str:
    """Which advice fits: that of libfabric's provider, where libfabric carries the channels."""
    if "FastSocket" in carried:
        return "socket_fallback"
    if provider is None or not any("Libfabric" in name for name in (inter, *carried)):
        return "net_without_gdrdma"
    if provider.startswith("efa"):
        return "efa_without_gdrdma"
    if provider.startswith("cxi"):
        return "slingshot_without_gdrdma"
    return "libfabric_over_tcp" if provider.startswith(("tcp", "sockets", "net")) else "net_without_gdrdma"


def _partial(evidence: Evidence, facts: Facts) -> str:
    """Why a part of the channels lacks GPUDirect RDMA: by NCCL's rule for sends, or for no reason that excuses it.

    The rule (ncclTopoCheckGdr): below compute capability 8.0 and without NVLink the NIC does not read GPU memory,
    unless the GPU is the only one of its node. Before 2.19 the rule held whatever the compute capability. Any fact
    of the log that speaks against such a GPU takes the excuse away.
    """
    one_way = (
        evidence.receive.total > 0
        and evidence.receive.gdrdma == evidence.receive.total
        and evidence.send.total > 0
        and evidence.send.gdrdma == 0
        and evidence.library == "nccl"  # AMD has no such rule
    )
    if not one_way:
        return "gdr_partial"
    if evidence.environment.get("NCCL_NET_GDR_READ") == "0":
        return "gdr_read_disabled_by_env"
    against = (
        (gpus_before_ampere(evidence.gpus) is False
         and not (_older_than(evidence, 19) and gpus_are("card", evidence.gpus)))
        or facts.local_ranks == 1  # a GPU alone on its node in every communicator: the rule leaves it out
        or evidence.nvls  # Hopper and later
        or evidence.nvls_use == "used"
        or facts.mnnvl or facts.mnnvl_fabric
        or facts.gdr_read_allowed  # "Enabled ... (distance 4 <= 4), read 1"
        or any(not enabled for enabled, _, _ in facts.gdr_paths)  # too far: not by the rule
        or any(name.endswith("/read") for name in evidence.transports)  # printed with NVLink on 8.0 only
        or facts.nvlink
    )  # fmt: skip
    return "gdr_partial" if against else "gdr_read_disabled_pre_ampere"


def _older_than(evidence: Evidence, minor: int) -> bool:
    """Whether the log names a version of NCCL before 2.minor."""
    parts = (evidence.nccl_version or "").split("+")[0].split(".")
    return len(parts) > 1 and parts[0] == "2" and parts[1].isdecimal() and int(parts[1]) < minor


def _distance(found: _Findings, evidence: Evidence, carried: list[str], state: str) -> None:
    """Every pair too far apart; NCCL says so while it plans, so also before there are channels."""
    paths = found.ledger.facts.gdr_paths
    if not paths or any(enabled for enabled, _, _ in paths) or state not in ("off", "none") or "Socket" in carried:
        return
    if evidence.inter_node_transport and not found.found.keys() & {"gdr_disabled_by_env", "peermem_missing"}:
        lines = found.proof("GPUDirect RDMA too far")
        severity = "fail" if state == "off" else ""  # no channel has it, and this is why
        found.add("gdr_distance_too_far", "; ".join(evidence.gdr_paths[:3]), lines, severity=severity)


def _part(evidence: Evidence, lacking: list[str]) -> str:
    send, receive = evidence.send, evidence.receive
    noun = "channel" if max(send.total, receive.total) == 1 else "channels"
    seen = [
        f"{word} {side.gdrdma} of {side.total}" for word, side in (("send", send), ("receive", receive)) if side.total
    ]
    text = f"{', '.join(seen)} {noun}"
    return text + (f"; without it: channels of {', '.join(lacking[:16])}" if lacking else "")


def _channel_proof(found: _Findings) -> tuple[ProofLine, ...]:
    rows = [row for fact, rows in found.ledger.proof.items() if fact.endswith("without GDRDMA") for row in rows]
    firsts = [rows[0] for fact, rows in found.ledger.proof.items() if fact.endswith("without GDRDMA")]
    return (*firsts, *(row for row in rows if row not in firsts)) or found.proof("GPUDirect RDMA refused")


def _within_node(found: _Findings, evidence: Evidence) -> None:
    shm = evidence.transports.get("SHM", 0)
    peer = sum(n for key, n in evidence.transports.items() if key.startswith("P2P/"))
    env = evidence.environment
    if shm and env.get("NCCL_P2P_DISABLE") == "1":
        found.add("p2p_disabled_by_env", lines=found.proof("transport SHM"))
    elif shm and "NCCL_P2P_LEVEL" in env:
        found.add("p2p_level_limited_by_env", detail=env["NCCL_P2P_LEVEL"], lines=found.proof("transport SHM"))
    elif shm and peer:
        found.add("shm_across_pairs", detail=f"{shm} of {shm + peer} channels", lines=found.proof("transport SHM"))
    if evidence.inter_node_transport is None and any(key.startswith("NET/") for key in evidence.transports):
        causes = [f"{name}={env[name]}" for name in _WITHIN_NODE if env.get(name, "0") not in ("0", "")]
        only = not any(key.startswith(("P2P/", "SHM")) for key in evidence.transports)
        found.add(
            "net_only_within_node" if only and causes else "net_within_node",
            detail=", ".join(causes),
            lines=(*found.variable_proof(*_WITHIN_NODE), *found.proof("NET/")),
        )


def _ports(found: _Findings, ledger: Ledger, ports: Collection[str] | None) -> None:
    """A dead port is silent: NCCL lists active ports only. Compare with what should be there, and host with host."""
    facts = ledger.facts
    listed = {host: {port for other, port in facts.ports if other == host} for host in facts.whole_lists}
    missing: list[str] = []
    if ports is not None:
        wanted = {port if ":" in port else f"{port}:1" for port in ports}
        # A plugin that lists no ports (EFA) says nothing about them.
        none_found: dict[str, set[str]] = {"": set()} if facts.counts["no RDMA device"] else {}
        for host, row in (listed or none_found).items():
            seen = {f"{name}:{port.split(':')[1]}" for port in row for name in port.split(":")[0].split("+")}
            missing += [f"{host or 'this host'}: {port} (which --port names)" for port in sorted(wanted - seen)]
    elif len(listed) > 1:
        whole = max(listed, key=lambda host: len(listed[host]))
        for host, row in listed.items():
            if row < listed[whole]:
                missing += [f"{host}: {port} (which {whole} lists)" for port in sorted(listed[whole] - row)]
    if missing:
        shown = ", ".join(missing[:16]) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
        hosts = tuple(dict.fromkeys(each.partition(": ")[0] for each in missing if not each.startswith("this host: ")))
        lines = found.proof("RDMA devices in use")
        found.add("dead_port", detail=shown, lines=lines, count=len(missing), hosts=hosts)


def _tuned(evidence: Evidence) -> Iterator[str]:
    ofi = "Libfabric" in (evidence.inter_node_transport or "")
    for name, value in evidence.environment.items():
        off = value == "0" and name in _OFF_BY_DEFAULT
        if name in WORDS_OF["tuning"] and not off and not (ofi and name in WORDS_OF["set_by_ofi"]):
            yield f"{name}={value}"


def _environment(found: _Findings, evidence: Evidence, notes: list[LogProblem]) -> None:
    env, severity = evidence.environment, _if_several(found.ledger, evidence)[1]
    if env.get("NCCL_IB_DISABLE", "0") not in ("0", "") and evidence.inter_node_transport == "Socket":
        lines = found.variable_proof("NCCL_IB_DISABLE")
        found.add("ib_disabled_by_env", detail=env["NCCL_IB_DISABLE"], lines=lines, severity=severity)
    if env.get("NCCL_NET") == "Socket" and evidence.inter_node_transport == "Socket":
        found.add("socket_forced_by_env", lines=found.variable_proof("NCCL_NET"), severity=severity)
    odd = [f"{name}={env[name]}" for name in _LEVEL_NAMES if name in env and not _LEVEL.match(env[name])]
    if odd:
        found.add("unknown_level_value", detail=", ".join(odd), lines=found.variable_proof(*_LEVEL_NAMES))
    tuned = tuple(_tuned(evidence))
    if tuned:
        lines = found.variable_proof(*(setting.partition("=")[0] for setting in tuned))
        found.add("hand_tuned_env", detail=", ".join(tuned[:12]), lines=lines, count=len(tuned))
        # Where the wire is proven, tuning is a matter for the advice, not a fault of the run.
        if evidence.transports or evidence.gdrdma != "none" or any(p.severity == "fail" for p in found.found.values()):
            _demote(found, "hand_tuned_env", notes)


def _nothing_seen(found: _Findings, evidence: Evidence, notes: list[LogProblem]) -> None:
    if any(problem.severity == "fail" for problem in found.found.values()) or evidence.torn_lines:
        return
    missing = missing_ranks(found.ledger) if evidence.gdrdma == "none" and evidence.transports else ()
    if evidence.gdrdma == "on" and not found.found:
        missing = _silent_nodes(found.ledger.facts)
    if missing:
        found.add("ranks_missing", detail=f"{rank_words(missing)} {'is' if len(missing) == 1 else 'are'} missing",
                  lines=found.proof("transport ", "NET/"))  # fmt: skip
    elif not evidence.transports and evidence.gdrdma == "none":
        if found.ledger.facts.ranks == 1:  # one rank alone has no channel
            return
        for unknown in [note for note in notes if note.code == "other_warnings"]:  # then they are all there is to read
            notes.remove(unknown)
            found.found[unknown.code] = replace(unknown, severity="warn")
        found.add("no_transport_evidence")
    elif evidence.gdrdma == "none" and evidence.inter_node_transport not in (None, "NVLink (MNNVL)"):
        found.add("no_inter_node_evidence")
