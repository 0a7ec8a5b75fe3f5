"""The search for bad nodes: this node's part in it, and the result as findings."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.base import units
from agent.base.output import explain_unwritable, render_template
from agent.checks.host_checks import make_finding
from agent.jobs.benchmark import advise_network_environment, describe_links, list_gpu_processes, list_gpus
from collectives.bench.plan import SpecError
from collectives.bench.run import detect_backend
from collectives.search.plan import STUCK, BadLink, SearchResult, Verdict, compute_loss
from collectives.search.rank import RankSettings
from collectives.search.run import SearchSpec, from_environment
from contracts import bounded, plain
from contracts.finding import Finding, by_loss
from contracts.host_list import compress_host_list, list_names, name_in_slurm
from contracts.tables import read_table
from probes.api import Snapshot

MAX_TOPOLOGY_BYTES = 256 << 20  # of `kubectl get nodes -o json`: about 20 KB per node
_TABLE = read_table(__file__, "search.toml")
# Color of a transfer by how much its time exceeds the median, worst first, and the text of the legend.
COLOURS = (
    (STUCK, "#1b1f24", "no byte moves"), (1.0, "#c0392b", "twice the time or more"),
    (0.1, "#e8a33d", "10 % more time or more"), (-math.inf, "#cfe8cf", "less"),
)  # fmt: skip


def build_spec(
    snapshots: Sequence[Snapshot], *, nodes: int | None, node_rank: int | None, rendezvous: str | None,
    ranks: int | None, host_name: str | None, domain: str | None, topology: Path | None, size_bytes: int | None,
    silence: float, wait: float, limit: float, journal: Path | None, no_advice: bool, force: bool,
) -> SearchSpec:  # fmt: skip
    """Create the spec of this node from the command line and the launcher's environment. Raises SpecError."""
    launched = from_environment(os.environ)
    nodes = nodes or launched.get("nodes", 1)
    node = launched.get("node", 0) if node_rank is None else node_rank
    default = launched.get("rendezvous", "127.0.0.1:29400" if nodes == 1 else "")
    rendezvous = rendezvous or make_resolvable(default)
    host, _, port = rendezvous.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise SpecError(f"rendezvous: {rendezvous!r} is not allowed; allowed: host:port of node 0")
    if not 0 <= node < nodes:
        raise SpecError(f"node_rank: {node} is not allowed; allowed: 0 to {nodes - 1}")
    if node == 0 and journal and (problem := explain_unwritable(journal)):
        raise SpecError(f"journal: {journal}: {problem}")
    gpus = list_gpus(snapshots[:1])
    ranks = ranks or launched.get("ranks") or len(gpus) or 1
    backend = detect_backend()
    name = host_name or (snapshots[0].hostname if snapshots else f"node {node}")
    domain, nvlink = _find_domains(domain, topology, name, describe_links(snapshots, ranks).get("nvlink_domain") or "")
    rank = RankSettings(
        store=rendezvous, nodes=nodes, node=node, local=0, ranks=ranks, host=name, domain=domain,
        nvlink="" if "NCCL_MNNVL_ENABLE" in os.environ else nvlink, wait_seconds=min(wait, limit / 2),
        model=(gpus[0].name or "") if gpus else "", backend=backend, silence_seconds=silence,
        bytes=size_bytes or ((256 if backend == "nccl" else 32) << 20), journal=str(journal or ""),
    )  # fmt: skip
    return SearchSpec(
        rank=rank, locals=launched.get("locals", tuple(range(ranks))), limit_seconds=limit,
        gpu_pids=list_gpu_processes(snapshots), force=force,
        environment={} if no_advice or nodes == 1 else advise_network_environment(snapshots),
    )  # fmt: skip


def make_resolvable(rendezvous: str) -> str:
    """Replace the name of a node that this host cannot resolve by its NodeAddr in Slurm's configuration."""
    from agent.jobs.slurm import SlurmError, run_slurm

    host, _, port = rendezvous.rpartition(":")
    with suppress(OSError):
        socket.getaddrinfo(host or "localhost", None)
        return rendezvous
    with suppress(SlurmError):  # without Slurm there is no scontrol
        if address := re.search(r"\bNodeAddr=(\S+)", run_slurm("scontrol", "show", "node", host)):
            return f"{address[1]}:{port}"
    return rendezvous


def _find_domains(given: str | None, topology: Path | None, name: str, of_links: str) -> tuple[str, str]:
    """Return the domain of the node (option, label, NVLink or Slurm's switch) and its NVLink domain; "" if unknown."""
    label, domain = find_domain(topology, name) if topology else ("", "")
    nvlink = domain if label in _TABLE["nvlink_labels"] else of_links
    switches = os.environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")  # "core.leaf3.gpu-07" (srun(1))
    return given or domain or nvlink or (switches[-2] if len(switches) > 1 else ""), nvlink


def find_domain(path: Path, name: str) -> tuple[str, str]:
    """Return the nearest domain label of a node and its value, from the output of `kubectl get nodes -o json`."""
    topology = plain.loads(bounded.read_text(path, MAX_TOPOLOGY_BYTES))
    for item in topology.get("items", ()) if isinstance(topology, dict) else ():
        metadata = item.get("metadata", {})
        if metadata.get("name") == name:
            labels = metadata.get("labels", {})
            labels_present = filter(labels.get, (*_TABLE["nvlink_labels"], *_TABLE["network_labels"]))
            return next(((label, str(labels[label])) for label in labels_present), ("", ""))
    raise SpecError(f"topology: {path} has no node {name!r}; allowed: the output of `kubectl get nodes -o json`")


# The result as findings, text, picture, and input for schedulers.


def make_findings(result: SearchResult) -> list[Finding]:
    """Return one finding for each bad node, bad link, and node without a result."""
    findings = [
        _make_unjudged(verdict, result.hosts[verdict.node], _evidence(verdict, result.passes))
        for verdict in result.verdicts if verdict.state != "good"
    ]  # fmt: skip
    for link in result.links:
        ends = {"source": result.hosts[link.source], "target": result.hosts[link.target]}
        findings.append(make_finding(
            "search.link.bad", ", ".join(ends.values()), by_loss(link.loss), evidence=_evidence(link, result.passes),
            share=_format_share(link.loss), **ends,
        ))  # fmt: skip
    for domain, loss in result.uplinks:
        findings.append(make_finding("search.uplink.slow", "", subject=domain, share=_format_share(loss)))
    return findings


def _make_unjudged(verdict: Verdict, node: str, evidence: tuple[str, ...]) -> Finding:
    if verdict.state == "not judged":
        reason = verdict.seen or _TABLE["why"][verdict.reason]
        return replace(make_finding("search.node.unjudged", node, evidence=evidence, why=reason), required=True)
    if verdict.reason in ("lost", "stuck"):
        return make_finding(f"search.node.{verdict.reason}", node, evidence=evidence, why=verdict.seen)
    rates = {what: compute_loss(m for m in verdict.measures if m.what == what) for what in verdict.what}
    rails = f"; of its rails (ranks with the same local number) only {', '.join(map(str, verdict.rails))}"
    return make_finding(
        f"search.node.{verdict.reason}", node, by_loss(verdict.loss), evidence=evidence,
        subject=verdict.what[0].partition(" ")[0] if verdict.reason == "part" else "",
        what=" and ".join(f"{what} at {_format_share(loss)}" for what, loss in rates.items()),
        rails=rails if verdict.rails else "",
    )  # fmt: skip


def _evidence(result: Verdict | BadLink, passes: int) -> tuple[str, ...]:
    partners = {"alone": "alone", "near": "with nodes of its domain", "far": "with nodes of other domains"}
    lines = [
        f"round {m.round}, {partners[m.kind]}: {m.what}"
        + ("" if m.what == "stuck" else f", {m.excess:.1%} more time than the median node, noise {m.sigma:.1%}")
        for m in result.measures
    ]
    return (*_TABLE["passes"][result.turn : passes - 1 + result.turn], *lines)


def _format_share(loss: float) -> str:
    return f"{1 - loss:.0%}" if loss > 0.1 else f"{1 - loss:.1%}"


def list_bad_nodes(result: SearchResult, *, named: bool = True) -> list[str]:
    """Return the names of the bad nodes; if `named`, without those that never joined, as "node 4"."""
    bad = [result.hosts[verdict.node] for verdict in result.verdicts if verdict.state == "bad"]
    return [name for name in bad if not (named and " " in name)]


def format_slurm_hosts(result: SearchResult) -> str:
    """Return the bad nodes as a Slurm host list, for --exclude."""
    names = [name_in_slurm(host) for host in list_bad_nodes(result)]
    return f"{compress_host_list(names)}\n" if names else ""


def build_affinity(result: SearchResult) -> dict[str, Any]:
    """Return a pod affinity that excludes the bad nodes; empty if there are none.

    A field selector has one value (Kubernetes API reference, NodeSelectorTerm), and all parts of a term must hold. The
    node's name is used, because the label kubernetes.io/hostname may differ.
    """
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in list_bad_nodes(result)]
    terms = {"nodeSelectorTerms": [{"matchFields": fields}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}} if fields else {}


def summarise(result: SearchResult) -> list[str]:
    """Name the bad nodes in the first line; then describe the search, and how to exclude the bad nodes from jobs."""
    bad, named, count = list_bad_nodes(result, named=False), list_bad_nodes(result), len(result.hosts)
    open_count = sum(verdict.state == "not judged" for verdict in result.verdicts)
    first = f"Bad nodes: {list_names(bad)}" if bad else "No bad node was found"
    first += f"; {units.count(len(result.links), 'bad link')}" if result.links else ""
    sight = "unknown" if result.visible_loss is None else f"{result.visible_loss:.1%}"
    pairs = count * (count - 1) // 2
    good = {domain for domain, verdict in zip(result.domains, result.verdicts, strict=True) if verdict.state != "bad"}
    whole = [domain for domain, nodes in Counter(result.domains).items() if domain and nodes > 1 and domain not in good]
    lines = [
        f"{first}; {open_count} of {count} nodes were not judged" if open_count else first,
        f"{units.count(count, 'node')}: {count - len(bad) - open_count} good, {len(bad)} bad, {open_count} "
        f"not judged. {units.count(result.rounds, 'round')}, {units.count(result.tests, 'test')}, "
        f"{units.seconds(result.seconds)}, {result.node_minutes:.1f} node-minutes"
        f"{'; the second of 2 passes used no NVLink between nodes' if result.passes > 1 else ''}.",
        f"Smallest loss of a node that is visible in this noise: {sight}. {result.tested_pairs} of {pairs} pairs of "
        f"nodes exchanged data{'' if result.tested_pairs == pairs else '; a fault between two others is not seen'}.",
    ]
    if whole:
        lines.append(f"All nodes of {list_names(whole)} are bad: check their common switch and its uplinks first.")
    if named:
        lines += [
            f"Slurm: --exclude={format_slurm_hosts(result).strip()}",
            f"Kubernetes: kubectl cordon {' '.join(named)}",
            f"Kubernetes, affinity of a pod: {json.dumps(build_affinity(result))}",
        ]
    return lines


def draw_pairs(result: SearchResult) -> str:
    """Draw the matrix of pairs as an `<svg>` with its own colors, for a file and a page."""
    places = {node: place for place, node in enumerate(result.drawn)}
    links = {(link.source, link.target) for link in result.links}
    cells = [
        {"row": places[a], "column": places[b], "colour": next(c for least, c, _ in COLOURS if excess >= least),
         "bad": (a, b) in links, "words": "no byte moved" if excess >= STUCK else f"{excess:+.1%} time"}
        for a, b, excess in result.pairs
    ]  # fmt: skip
    verdicts, count = result.verdicts, units.count(len(result.hosts), "node")
    nodes = [{"name": plain.printable(result.hosts[node]), "state": verdicts[node].state} for node in result.drawn]
    title = plain.printable(f"{summarise(result)[0]}. The picture shows {len(nodes)} of {count}.")
    return render_template(__file__, "search.svg.j2", title=title, nodes=nodes, cells=cells, legend=COLOURS)
