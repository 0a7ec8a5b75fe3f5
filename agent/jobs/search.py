"""The search for bad nodes: what this node does in it, and its result as findings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.base import units
from agent.checks.measured import make_finding
from agent.jobs.benchmark import gpu_processes, links_of, network_environment
from agent.jobs.child import has_gpu
from collectives.bench.plan import SpecError
from collectives.bench.run import visible_backend
from collectives.search.rank import Place
from collectives.search.run import SearchSpec, from_environment
from contracts import bounded, plain
from contracts.finding import Finding, by_loss
from contracts.host_list import compress_host_list, list_names, slurm_name
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts

MOST_TOPOLOGY_BYTES = 256 << 20  # of `kubectl get nodes -o json`: some 20 KB for each node
# What a node shares with its neighbours, nearest first: GPU feature discovery, NVIDIA topograph and its older names.
DOMAIN_LABELS = (
    "nvidia.com/gpu.clique", "accelerator.topograph.run/domain", "network.topology.nvidia.com/accelerator",
    "fabric.topograph.run/tier-0", "network.topology.nvidia.com/leaf",
)  # fmt: skip
WHY = {
    "undecided": "it was slow or stuck in some rounds, and fine in as many others",
    "unmeasured": "no test with other nodes came to its end",
    "few": "with fewer than three nodes the search cannot know which one is slow",
    "noise": "the noise of this network hides a loss of half the rate",
}


def spec_of(options: Mapping[str, Any], found: Sequence[Snapshot]) -> SearchSpec:
    """Make the spec of this node from the command line and the launcher's environment. Raises SpecError."""
    launched = from_environment(os.environ)
    nodes = options["nodes"] or launched.get("nodes", 1)
    node = launched.get("node", 0) if options["node_rank"] is None else options["node_rank"]
    rendezvous = options["rendezvous"] or launched.get("rendezvous") or ("127.0.0.1:29400" if nodes == 1 else "")
    host, _, port = rendezvous.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise SpecError(f"rendezvous: {rendezvous!r} is not allowed; allowed: host:port of node 0")
    if not 0 <= node < nodes:
        raise SpecError(f"node_rank: {node} is not allowed; allowed: 0 to {nodes - 1}")
    gpus = facts.gpus if found and (facts := found[0].facts(GpuFacts)) else ()
    ranks = options["ranks"] or launched.get("ranks") or (len(gpus) if has_gpu(found) else 1)
    backend = visible_backend()
    name = options["host_name"] or os.environ.get("SLURMD_NODENAME") or (found[0].hostname if found else f"node {node}")
    place = Place(
        store=rendezvous, node=node, local=0, ranks=ranks, host=name, domain=_domain(options, name, found, ranks),
        model=(gpus[0].name or "") if gpus else "", backend=backend, silence_seconds=options["silence"],
        bytes=options["bytes"] or ((256 if backend == "nccl" else 32) << 20), wait_seconds=options["wait"],
    )  # fmt: skip
    return SearchSpec(
        place=place, nodes=nodes, locals=launched.get("locals", tuple(range(ranks))), limit_seconds=options["limit"],
        journal=options["journal"], gpu_pids=gpu_processes(found), force=options["force"],
        environment={} if options["no_advice"] or nodes == 1 else network_environment(found),
    )  # fmt: skip


def _domain(options: Mapping[str, Any], name: str, found: Sequence[Snapshot], ranks: int) -> str:
    """Name the domain of the node from the options, its labels, NVLink or Slurm's topology; "" is unknown."""
    if options["domain"]:
        return str(options["domain"])
    if options["topology"]:
        return labelled_domain(options["topology"], name)
    if nvlink := links_of(found, ranks).get("nvlink_domain"):
        return str(nvlink)
    switches = os.environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")  # "core.leaf3.gpu-07" (srun(1))
    return switches[-2] if len(switches) > 1 else ""


def labelled_domain(path: Path, name: str) -> str:
    """The nearest domain that the labels of a node name, in the output of `kubectl get nodes -o json`."""
    read = plain.loads(bounded.read_text(path, MOST_TOPOLOGY_BYTES))
    for item in read.get("items", ()) if isinstance(read, dict) else ():
        metadata = item.get("metadata", {})
        if metadata.get("name") == name:
            labels = metadata.get("labels", {})
            return next((str(labels[label]) for label in DOMAIN_LABELS if labels.get(label)), "")
    raise SpecError(f"topology: {path} has no node {name!r}; allowed: the output of `kubectl get nodes -o json`")


# The result as findings.


def findings_of(result: Mapping[str, Any]) -> list[Finding]:
    """One finding for each bad node, bad link, and node that was not judged."""
    hosts: list[str] = result["hosts"]
    found = [_finding(verdict, hosts, result["lost"]) for verdict in result["verdicts"] if verdict["state"] != "good"]
    for link in result["links"]:
        ends = {"source": hosts[link["source"]], "target": hosts[link["target"]]}
        found.append(make_finding(
            "search.link.bad", ", ".join(ends.values()), by_loss(link["loss"]), evidence=_evidence(link["measures"]),
            share=_share(link["loss"]), **ends,
        ))  # fmt: skip
    return found


def _finding(verdict: Mapping[str, Any], hosts: Sequence[str], lost: Mapping[str, str]) -> Finding:
    node, loss = hosts[verdict["node"]], verdict["loss"]
    evidence = _evidence(verdict["measures"])
    if verdict["state"] == "not judged":
        return make_finding("search.node.unjudged", node, evidence=evidence, why=WHY[verdict["reason"]])
    if verdict["reason"] == "lost":
        return make_finding("search.node.lost", node, why=lost[str(verdict["node"])])
    if verdict["reason"] == "stuck":
        return make_finding("search.node.stuck", node, evidence=evidence)
    what, rails = verdict["what"], verdict["rails"]
    if verdict["reason"] == "part":
        return make_finding("search.node.part", node, by_loss(loss), subject=what[0].partition(" ")[0],
                            evidence=evidence, what=", ".join(what), share=_share(loss))  # fmt: skip
    words = f"; of its rails (ranks with the same local number) only {', '.join(map(str, rails))}" if rails else ""
    return make_finding("search.node.slow", node, by_loss(loss), evidence=evidence, what=" and ".join(what),
                        share=_share(loss), rails=words)  # fmt: skip


def _evidence(measures: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    partners = {"alone": "alone", "near": "with nodes of its domain", "far": "with nodes of other domains"}
    amount = ", {excess:.1%} more time than the middle node, noise {sigma:.1%}"
    return tuple(
        f"round {m['round']}, {partners[m['kind']]}: {m['what']}{'' if m['what'] == 'stuck' else amount.format(**m)}"
        for m in measures
    )


def _share(loss: float) -> str:
    return f"{1 - loss:.0%}" if loss > 0.1 else f"{1 - loss:.1%}"


def bad_nodes(result: Mapping[str, Any]) -> list[str]:
    """Names of the bad nodes."""
    return [result["hosts"][verdict["node"]] for verdict in result["verdicts"] if verdict["state"] == "bad"]


def slurm_hosts(result: Mapping[str, Any]) -> str:
    """The bad nodes as a host list of Slurm, for --exclude."""
    names = [slurm_name(host) for host in bad_nodes(result)]
    return f"{compress_host_list(names)}\n" if names else ""


def summary(result: Mapping[str, Any]) -> list[str]:
    """Name the bad nodes in the first line; then what the search did, and how to exclude the bad nodes from jobs."""
    hosts, bad, links = result["hosts"], bad_nodes(result), result["links"]
    open_count = sum(verdict["state"] == "not judged" for verdict in result["verdicts"])
    first = f"Bad nodes: {list_names(bad)}" if bad else "No bad node was found"
    first += f"; {units.count(len(links), 'bad link')}" if links else ""
    loss, pairs = result["visible_loss"], len(hosts) * (len(hosts) - 1) // 2
    sight = "unknown" if loss is None else f"{loss:.1%}"
    lines = [
        f"{first}; {open_count} of {len(hosts)} nodes were not judged" if open_count else first,
        f"{units.count(len(hosts), 'node')}: {len(hosts) - len(bad) - open_count} good, {len(bad)} bad, {open_count} "
        f"not judged. {units.count(result['rounds'], 'round')}, {units.count(result['tests'], 'test')}, "
        f"{units.seconds(result['seconds'])}, {result['node_minutes']:.1f} node-minutes.",
        f"Smallest loss of a node that is visible in this noise: {sight}. {result['tested_pairs']} of {pairs} pairs of "
        "nodes exchanged data; a fault between two others is not seen.",
    ]
    if bad:
        lines += [f"Slurm: --exclude={slurm_hosts(result).strip()}", f"Kubernetes: kubectl cordon {' '.join(bad)}"]
    return lines
