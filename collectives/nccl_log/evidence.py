"""Evidence: what a training log proves about the transports that NCCL used.

``read_files`` reads logs (``-`` is stdin) and returns the verdict. ``environment`` returns the variables with which a
run logs this evidence. ``exit_code`` converts a verdict to the exit code of a gate. Formats, codes and the rules by
which a verdict is derived: docs/explanation/evidence.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Literal

from collectives.nccl_log import problems as evidence_problems
from collectives.nccl_log.codes import LOGGING, PATHS, list_codes, make_problem
from collectives.nccl_log.ledger import Ledger, Runs
from collectives.nccl_log.messages import FABRIC
from collectives.nccl_log.reader import BLOCK_BYTES, LogFileError, Reader, Unpacked, holds_text
from collectives.nccl_log.transport import ChannelCount, Evidence, LogProblem, ProofLine, RunEvidence, by_severity
from contracts.bounded import open_regular, utf8_chunks
from contracts.redaction import without_secrets

MAX_PROOF = 64


def find_version(ledger: Ledger) -> str | None:
    """Return the version in the log; the more detailed one if several lines differ in detail."""
    facts = ledger.facts
    if facts.rccl_versions:
        return f"RCCL {next(iter(facts.rccl_versions))}"
    return max(facts.versions, key=lambda text: ("+" in text, facts.versions[text]), default=None)


def describe_gdr_paths(ledger: Ledger, version: str | None) -> tuple[str, ...]:
    """Return the "distance" lines in words. They say what NCCL thought possible, not what it did."""
    digits = re.match(r"(?:RCCL )?\d+\.(\d+)(?:\.(\d+))?", version or "")
    release = (int(digits[1]), int(digits[2] or 0)) if digits else (-1, 0)
    names = dict(enumerate(next((names for first, names in reversed(PATHS) if first <= release), ())))
    return tuple(
        f"{'enabled' if enabled else 'disabled'}: {names.get(distance, f'distance {distance}')} where "
        f"{names.get(limit, f'distance {limit}')} is allowed ({count} line{'s' * (count != 1)})"
        for (enabled, distance, limit), count in ledger.facts.gdr_paths.most_common()
    )


def name_network(network: str, provider: str | None = None) -> str:
    """Return the common name of the network between nodes."""
    if network.startswith("IBext"):
        return f"IB (plugin {network})"
    if network in ("AWS Libfabric", "Libfabric"):
        if provider is None:  # the plugin serves EFA, Slingshot and others, so its name does not identify the network
            return f"libfabric ({network})"
        return f"{'EFA' if provider.startswith('efa') else provider} ({network})"
    return network


def find_selected_network(ledger: Ledger) -> str | None:
    """Return the network that NCCL reports as selected; the RDMA network if ranks differ."""
    facts = ledger.facts
    names = facts.networks or facts.assigned
    if names:
        return max(names, key=lambda name: (name != "Socket", names[name]))
    # Before 2.5 no line names the network. Sockets are set up and listed only if no RDMA device was found.
    if facts.counts["RDMA devices"] or any(ledger.codes[code] for code in list_codes("verbs")):
        return "IB"
    return "Socket" if facts.sockets or facts.counts["socket interfaces"] else None


def _find_inter(ledger: Ledger) -> str | None:
    provider, single = ledger.facts.provider, evidence_problems.is_single_node(ledger)
    names = _list_networks(ledger)
    torn = [key.partition("/")[2] for key in ledger.count_transports(cut=True) if key.startswith("NET/")]
    carrying = {channel.transport for _, channel in ledger.channels}
    alone = [name_network(name, provider) for name in names or torn if f"NET/{name}" in carrying]
    joined = [] if single is True else alone or [f"COLLNET ({name})" for name in names]
    if _nvlink_joins_nodes(ledger):
        joined.append("NVLink (MNNVL)")
    if joined:
        return mixed(joined)
    if single is True or ledger.codes["duplicate_gpu"]:
        return None
    if single is None and _list_intra(ledger) and not evidence_problems.missing_ranks(ledger):
        return None
    network = find_selected_network(ledger)
    return name_network(network, provider) if network else "unknown"


def mixed(names: list[str]) -> str:
    """Return the transports in words."""
    return names[0] if len(names) == 1 else "mixed " + " + ".join(name.removeprefix("mixed ") for name in names)


def _nvlink_joins_nodes(ledger: Ledger) -> bool:
    """Return whether MNNVL channels cross operating systems; NCCL prints MNNVL within one too (transport/p2p.cc)."""
    return not _cliques_end_at_hosts(ledger) and any(key.startswith("P2P/MNNVL") for key in ledger.count_transports())


def _cliques_end_at_hosts(ledger: Ledger) -> bool:
    """Return whether each NVLink clique, which NCCL counts as a node, is one host; False if hosts may be missing."""
    facts = ledger.facts
    small = 0 < facts.mnnvl_clique <= facts.local_ranks <= evidence_problems.MAX_GPUS_OF_A_NODE
    return small and 1 < facts.nodes == ledger.host_count()


def _list_networks(ledger: Ledger) -> list[str]:
    """Return the networks with channels, without names that are fragments in torn lines ("NET/IB" of "NET/IBext")."""
    counts = {name: count.total for name, count in ledger.networks().items()}
    real = {name for name in counts if name in ledger.facts.networks}
    total = sum(counts.values())
    # Never selected, and on less than 1 % of the lines of a selected network.
    names = [name for name, count in counts.items() if name in real or not real or count * 100 > total]
    return sorted(names, key=lambda name: -counts[name])


def _list_intra(ledger: Ledger) -> list[str]:
    table = {key: n for key, n in ledger.count_transports().items() if key.startswith(("P2P/", "SHM"))}
    table = table or {key: n for key, n in ledger.count_transports(cut=True).items() if key.startswith("P2P/")}
    # "P2P/IPC" can be a fragment of "P2P/IPC/read" in a torn line: below 1 % it is not a second transport.
    cut = {key for key in table for full in table if full.startswith(f"{key}/") and table[key] * 100 < table[full]}
    return sorted(table.keys() - cut, key=lambda key: (key == "SHM", -table[key], key))


def _find_intra(ledger: Ledger) -> str | None:
    keys, facts = _list_intra(ledger), ledger.facts
    if evidence_problems.is_single_node(ledger) is True:
        keys += [key for key in ledger.count_transports() if key.startswith("NET/")]
    if keys:
        return mixed(keys)
    if ledger.codes["shm_too_small"]:
        return "SHM (attempted)"
    if ledger.codes["duplicate_gpu"] or ledger.codes["p2p_disabled_nvlink"]:
        return "none (init failed)"
    is_alone = facts.local_ranks == 1 or facts.ranks == 1
    carried = any(channel.network for _, channel in ledger.channels)
    return None if is_alone or (facts.local_ranks == 0 and carried) else "unknown"


def _judge_gdrdma(ledger: Ledger, inter: str | None) -> str:
    count = ledger.count_wires().get((), ChannelCount())
    total, on = count.total, count.gdrdma
    # Tags that were found at the start of lines belong to as many channels that seem to have none.
    if total:
        return "on" if total - on <= ledger.counts["orphan tags"] else "partial" if on else "off"
    if ledger.cut_wires():
        return "off" if inter == "Socket" else "none"
    if inter == "Socket":  # only selected: it carries nothing in a single-node job
        return "off" if evidence_problems.is_single_node(ledger) is False else "none"
    refused = {enabled for (name, enabled) in ledger.facts.gdr_hca if name in ("IB", "IBext")}
    return "off" if refused == {False} and inter is not None and inter.startswith("IB") else "none"


def _count_devices(ledger: Ledger) -> dict[str, ChannelCount]:
    """Return channels by network device; devices of different hosts are separate, because each host numbers its own."""
    several = len([host for (host,) in ledger.count_wires("host") if host]) > 1
    members = ("host", "network", "device") if several else ("network", "device")
    counts = sorted(ledger.count_wires(*members).items(), key=itemgetter(0))
    return {" ".join([*host, f"{network}/{device}"]).strip(): count for (*host, network, device), count in counts}


def _count_by_host(ledger: Ledger) -> dict[str, dict[str, ChannelCount]]:
    """Return the network channels per host, if several hosts have some."""
    rows: dict[str, dict[str, ChannelCount]] = {}
    for (host, network), count in sorted(ledger.count_wires("host", "network").items(), key=itemgetter(0)):
        rows.setdefault(host, {})[network] = count
    return {name: row for name, row in rows.items() if name} if len(rows) > 1 else {}


def _list_proof(ledger: Ledger) -> tuple[ProofLine, ...]:
    """Return channels between nodes first, then within a node, then announcements."""
    kinds = ("NET/", "COLLNET/"), ("transport ",), ("",)
    lines = [
        (next(place for place, start in enumerate(kinds) if fact.startswith(start)), row.line, row)
        for fact, rows in ledger.proof.items() if not fact.startswith(FABRIC) for row in rows[:2]
    ]  # fmt: skip
    return tuple(row for *_, row in sorted(lines, key=itemgetter(0, 1))[:MAX_PROOF])


def _judge_mnnvl(ledger: Ledger) -> str:
    if _nvlink_joins_nodes(ledger):
        return "used"
    if _cliques_end_at_hosts(ledger):
        return "off"
    if ledger.facts.mnnvl:
        return "enabled"
    if ledger.facts.mnnvl_fabric:
        return "available"
    return "unknown" if ledger.facts.mnnvl is None else "off"


def judge(ledger: Ledger) -> Evidence:
    """Return the verdict on everything that was counted."""
    facts = ledger.facts
    version = find_version(ledger)
    inter = _find_inter(ledger)
    directions = ledger.count_wires("direction")
    send, receive, other = (directions.get((name,), ChannelCount()) for name in ("send", "receive", None))
    total = send.total + receive.total + other.total
    proxied = {channel.proxied for _, channel in ledger.channels if channel.direction == "send" and not channel.is_cut}
    layers = evidence_problems.list_layers(ledger)
    # "Multicast available" means hardware support; NVLS is used only if a communicator set it up.
    nvls = "available" if "available" in facts.nvls_support else "not available" if facts.nvls_support else "unknown"
    evidence = Evidence(
        library="rccl" if facts.rccl or facts.rccl_versions or (version and "+hip" in version) else "nccl",
        nccl_version=version,
        inter_node_transport=inter,
        intra_node_transport=_find_intra(ledger),
        gdrdma=_judge_gdrdma(ledger, inter),
        send=send,
        receive=receive,
        undirected=other,
        transports=dict(ledger.count_transports().most_common()),
        proof=_list_proof(ledger),
        environment=dict(facts.environment),
        network=find_selected_network(ledger) if facts.networks or facts.assigned else None,
        hcas=tuple(sorted({f"{port}/{layer}" for (_, port), layer in facts.ports.items()})),
        link_layer="mixed" if len(layers) > 1 else next(iter(layers), None),
        socket_interface=next(iter(facts.sockets or facts.bootstrap), None),
        ranks=facts.ranks or None,
        nodes=facts.nodes or None,
        pxn=True in proxied if proxied else None,
        lines_read=ledger.lines,
        torn_lines=ledger.cut_wires(),
        gdrdma_fraction=(send.gdrdma + receive.gdrdma + other.gdrdma) / total if total else None,
        devices=_count_devices(ledger),
        by_host=_count_by_host(ledger),
        gdr_paths=describe_gdr_paths(ledger, version),
        fabric=tuple(rows[0] for fact, rows in ledger.proof.items() if fact.startswith(FABRIC)),
        nvls_use="used" if facts.nvls_made else nvls,
        mnnvl_use=_judge_mnnvl(ledger),
        mnnvl_clique=facts.mnnvl_clique or None,
        gpus=facts.gpu_names(),
        hosts=ledger.host_count() or None,
        missing_ranks=facts.unread_ranks(),
    )
    return evidence_problems.find(ledger, evidence)


def judge_runs(runs: Runs) -> Evidence:
    """Return the verdict on all runs: counts of all, and problems of each run."""
    if len(runs.ledgers) < 2:
        return replace(judge(runs.ledgers[0] if runs.ledgers else Ledger()), lines_read=runs.lines)
    each = [judge(ledger) for ledger in runs.ledgers]
    rows = tuple(
        RunEvidence(
            first=ledger.first, inter_node_transport=one.inter_node_transport,
            intra_node_transport=one.intra_node_transport, gdrdma=one.gdrdma, outcome=one.outcome, proven=proven(one),
        )
        for ledger, one in zip(runs.ledgers, each, strict=True)
    )  # fmt: skip
    combined = Ledger()
    for ledger in runs.ledgers:
        combined.merge(ledger)
    begins = tuple(row.first for row in rows)
    note = make_problem("several_runs", str(len(rows)), lines=begins[:3], count=len(rows))
    apart = any(judged.is_of_another_job(other) for judged, other in combinations(runs.ledgers, 2))
    jobs = (make_problem("several_jobs", " and ".join(dict.fromkeys(row.file for row in begins))),) if apart else ()
    joining = [*dict.fromkeys(run.inter_node_transport for run in each if run.inter_node_transport)]
    return replace(
        judge(combined),
        inter_node_transport=mixed(joining) if joining else None,
        problems=_join_problems([jobs, *(run.problems for run in each)]),
        notes=(note, *_join_problems([run.notes for run in each])),
        missing_ranks=tuple(sorted({rank for run in each for rank in run.missing_ranks})),
        rank_hosts={},  # a rank may have another host in each run
        outcome=min((run.outcome for run in each), key=("failed", "unknown", "finished").index),
        runs=rows,
        lines_read=runs.lines,
    )


def _join_problems(each: list[tuple[LogProblem, ...]]) -> tuple[LogProblem, ...]:
    """Merge problems of several runs: each code once, with the lines of all."""
    by_code: dict[str, LogProblem] = {}
    for problem in (problem for problems in each for problem in problems):
        first = by_code.get(problem.code)
        by_code[problem.code] = problem if first is None else replace(
            first, lines=(*first.lines, *problem.lines)[:3], count=first.count + problem.count,
            hosts=tuple(sorted({*first.hosts, *problem.hosts})),
            ranks=tuple(sorted({*first.ranks, *problem.ranks})),
        )  # fmt: skip
    return by_severity(by_code.values())


def proven(evidence: Evidence) -> bool:
    """Return whether the log shows the expected channels: between nodes in both directions, or within a single node."""
    if evidence.runs:
        return all(run.proven for run in evidence.runs)
    if evidence.gdrdma != "none":
        return not evidence_problems.is_one_direction(evidence)
    return bool(evidence.transports) and evidence.inter_node_transport in (None, "NVLink (MNNVL)")


PASS, FAILED, WARNED, NO_EVIDENCE = 0, 3, 4, 5


def read_files(paths: Iterable[str | Path | BinaryIO], *, require_gdrdma: bool = True) -> Evidence:
    """Return one verdict on several files or folders, such as the logs of a run's processes; "-" is stdin.

    Files compressed with gzip, bzip2 or xz are supported. Raises ``LogFileError`` if decompression fails. A lack of
    GPUDirect RDMA is only information unless it is required.
    """
    runs = Runs()
    files = list(list_files(paths))
    for file in files:
        file_runs = Runs()
        name = str(file) if len(files) > 1 and isinstance(file, str | Path) else ""
        try:
            if isinstance(file, str | Path) and str(file) != "-":
                with open_regular(file) as opened:
                    _take(file_runs, opened, name)
            else:
                _take(file_runs, sys.stdin.buffer if isinstance(file, str | Path) else file, name)
        except LogFileError as error:
            raise LogFileError(f"{file if isinstance(file, str | Path) else 'the file'}: {error}") from None
        runs.join(file_runs)
    evidence: Evidence = without_secrets(judge_runs(runs))
    mild = () if require_gdrdma else list_codes("gdr")
    rows = (replace(row, severity="info") if row.code in mild else row for row in evidence.problems)
    return replace(evidence, problems=by_severity(rows))


def list_files(paths: Iterable[str | Path | BinaryIO]) -> Iterator[str | Path | BinaryIO]:
    """Return the files; a folder is replaced by all text files in it and its subfolders, sorted by name."""
    for path in paths:
        if isinstance(path, str | Path) and str(path) != "-" and Path(path).is_dir():
            inside = sorted(file for file in Path(path).rglob("*") if file.is_file() and holds_text(file))
            if not inside:
                raise LogFileError(f"{path}: no text file in this folder: expected the logs of a run")
            yield from inside
        else:
            yield path


def _take(runs: Runs, file: BinaryIO, name: str) -> None:
    reader = Reader(runs, file=name)
    buffer = b""
    for chunk in utf8_chunks(Unpacked(file)):
        block, newline, buffer = (buffer + chunk).rpartition(b"\n")
        if newline:
            reader.feed(block + newline)
        elif len(buffer) >= BLOCK_BYTES:
            # A progress bar, or a whole log in one line of JSON: process the complete parts as part of the same line.
            mark = next((mark for mark in (b"\r", b"\\n", b'"],', b"},") if mark in buffer), b"\r")
            lines, end, tail = buffer.rpartition(mark)
            if end:
                reader.feed(lines)
                reader.ledger.lines -= 1
            # Without a line end for this long it is not a log; limit the memory used for it.
            buffer = tail[:BLOCK_BYTES]
    if buffer:
        reader.feed(buffer, cut=not buffer.endswith(b"\r"))
    reader.finish()


def environment(debug_dir: str | Path) -> dict[str, str]:
    """Return the variables with which NCCL logs evidence: one file per process in ``debug_dir``, for ``read_files``."""
    return {**LOGGING, "NCCL_DEBUG_FILE": str(Path(debug_dir) / "nccl.%h.%p.log")}


def exit_code(evidence: Evidence, *, fail_on: Literal["fail", "warn"] = "fail") -> int:
    """Return the exit code of a gate.

    0: the transport is proven (GPUDirect RDMA on every network channel, or a single node or NVLink domain with channel
    lines) and no problem fails it. 3: a problem of severity "fail", which includes GPUDirect RDMA off or partial
    between nodes (see ``read_files``). 4: with ``fail_on="warn"``, a problem of severity "warn". 5: no evidence.
    """
    severities = {row.severity for row in evidence.problems}
    if "fail" in severities:
        return FAILED
    if not proven(evidence):
        return NO_EVIDENCE
    return WARNED if fail_on == "warn" and "warn" in severities else PASS
