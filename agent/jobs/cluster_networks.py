"""One fine-tune over each network of a cluster: a job per network, one after another, and what their records say.

Each job's pods are attached to the network that it is for and told to take it; pod 0 leaves the short form of its
record as its container's termination message (finetune.post), which is read back from its status. Surface: the job APIs
of `launch`, and pods of core/v1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent.advice.advise import answer
from agent.advice.request import Request
from agent.cluster.client import Client, path_of
from agent.jobs import cluster_job, first_pods
from agent.jobs.networks import Bar, bar_of
from agent.jobs.transport import transport
from contracts.job_plan import RunForecast
from contracts.run_record import RunRecord, record_of
from planner.advice import Recommendation
from planner.kubernetes.job import JobError
from planner.kubernetes.manifests import POD_LABELS, Document
from planner.nccl_env.texts import Reason, Setting
from probes.api import Snapshot

MOST_NETWORKS = 8
POLL_SECONDS = 2.0
_RATE = r"[1-9][0-9]{0,5}(?:\.[0-9]{1,3})?[GM]"
_WORD = re.compile(rf"([a-z][a-z0-9]{{0,14}})(?:=((?:[a-z0-9.-]{{1,63}}/)?[a-z0-9.-]{{1,63}}))?(?:,({_RATE}))?")
_RDMA = ("rdma/", "openshift.io/", "vpc.amazonaws.com/efa")
_TCP_SETTINGS = ("NCCL_IB_", "NCCL_NET", "NCCL_CROSS_NIC", "NCCL_P2P_NET", "FI_", "OFI_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A network of the pods: their own, or one that Multus attaches."""

    name: str  # of the interface in the pods; "rdma" for RDMA
    attachment: str | None = None  # NetworkAttachmentDefinition: "net" or "namespace/net"
    rate: str | None = None  # "25G" for each node

    @property
    def rdma(self) -> bool:
        """Whether it is asked for as RDMA, and not as TCP over an interface."""
        return self.name == "rdma"


def parse(words: Sequence[str]) -> tuple[Attached, ...]:
    """ "eth0,10G", "net1=training/macvlan,25G", "rdma=training/macvlan". ValueError names what is wrong."""
    made = []
    for word in words:
        found = _WORD.fullmatch(word)
        if not found or found[1] == "lo":
            raise ValueError(
                f"--over {word!r}: must be INTERFACE[=ATTACHMENT][,RATE] as the pods see it: eth0, "
                "net1=training/macvlan,25G, or rdma=training/macvlan for RDMA"
            )
        made.append(Attached(name=found[1], attachment=found[2], rate=found[3]))
    if not made or len({one.name for one in made}) < len(made) or len(made) > MOST_NETWORKS:
        raise ValueError(f"--over: name 1 to {MOST_NETWORKS} networks, each once: eth0 is the pods' own")
    return tuple(made)


def has_rdma(advice: Recommendation, found: Sequence[Snapshot]) -> bool:
    """Whether the recorded nodes were seen to have RDMA devices that NCCL can use."""
    return bool(transport(advice, found))


def over(advice: Recommendation, network: Attached, request: Request, found: Sequence[Snapshot]) -> Recommendation:
    """The same plan told to take this network; with its rate, the same layout forecast over it."""
    chosen = advice.chosen
    assert chosen is not None  # noqa: S101 - the verb has refused otherwise
    if network.rate:
        on_network = replace(request, network=network.rate, transport="rdma" if network.rdma else "tcp")
        same = {"dp_replicate", "dp_shard", "tp", "pp", "cp", "micro_batch", "gradient_accumulation", "sharding"}
        named = tuple((name, getattr(chosen.layout, name)) for name in sorted(same))
        there = answer(replace(on_network, train=replace(request.train, asked=named)), found)
        if there.chosen is None:
            raise JobError(f"--over {network.name},{network.rate}: no forecast: {there.rejected[0].reason}")
        chosen = replace(chosen, forecast=there.chosen.forecast)
    needs = tuple(need for need in advice.needs if need.name != "network")
    if network.rdma:
        return replace(advice, chosen=chosen, needs=needs)
    why = Reason(rule="compare-networks runs over TCP on this interface", evidence=f"--over {network.name}",
                 source="the user")  # fmt: skip
    kept = tuple(
        setting for setting in advice.settings
        if not setting.name.startswith(_TCP_SETTINGS) and not setting.name.endswith("_SOCKET_IFNAME")
    )  # fmt: skip
    backend = "NCCL" if advice.backend == "nccl" else "GLOO"
    variables = [(f"{backend}_SOCKET_IFNAME", network.name), *([("NCCL_IB_DISABLE", "1")] if backend == "NCCL" else [])]
    return replace(
        advice, chosen=chosen, settings=(*kept, *(Setting(name=n, value=v, reason=why) for n, v in variables)),
        needs=tuple(n for n in needs if n.name not in ("memlock", "capability") and not n.value.startswith(_RDMA)),
    )  # fmt: skip


def documents(
    advice: Recommendation, network: Attached, options: Mapping[str, Any], found: Sequence[Snapshot]
) -> tuple[Document, ...]:
    """The job of one network: its name ends with the network's, and so does its output folder."""
    options = {**options, "name": f"{options['name']}-{network.name}"}
    spec = cluster_job.spec_of(advice, options)
    if network.attachment:
        inside = "" if network.rdma else f"@{network.name}"
        spec = replace(spec, networks=(f"{network.attachment}{inside}",))
    plan = cluster_job.plan_of(advice, options, found)
    if not (network.rate or network.rdma):  # nothing is known of it that the run could be held against
        plan = replace(plan, forecast=RunForecast())
    return cluster_job.documents(spec, options["api"], plan)


def run(
    client: Client, made: Sequence[Document], network: Attached, api: str, *, seconds: float,
    say: Callable[[str], None], sleep: Callable[[float], None], clock: Callable[[], float],
) -> Bar:  # fmt: skip
    """Create one network's job, wait for its end, and read its record. JobError, ApiError where it cannot be made."""
    bar = Bar(network=network.name, carries=network.attachment or "the pods' own network")
    for line in cluster_job.create(client, made):
        say(line)
    job, until = made[-1], clock() + seconds
    about = job["metadata"]
    while not (state := cluster_job.job_state(cluster_job.stored(client, job))):
        if clock() > until:
            return replace(bar, why=f"{cluster_job.named(job)} was not done within {seconds:.0f} s; it goes on")
        sleep(POLL_SECONDS)
    query = {"labelSelector": f"{POD_LABELS[api]}={about['name']}"}
    place = path_of("v1", "pods", namespace=about.get("namespace") or client.namespace)
    pods = [pod for page, _ in client.pages(place, query) for pod in page]
    record = next((found for pod in pods if (found := left(pod))), None)
    if record is None:
        reason = "; ".join(filter(None, map(first_pods.how_failed, pods))) or "no pod left a record"
        return replace(bar, status="failed" if state == "failed" else "unknown", why=f"{state}: {reason}")
    return bar_of(bar, record, network.name, rdma=network.rdma)


def left(pod: Mapping[str, Any]) -> RunRecord | None:
    """The short record that pod 0 left as its termination message; None where this pod has none."""
    for each in (pod.get("status") or {}).get("containerStatuses") or ():
        message = ((each.get("state") or {}).get("terminated") or {}).get("message") or ""
        try:
            found = json.loads(message)
        except ValueError:
            continue
        if isinstance(found, dict) and "transports" in found:
            return record_of(found)
    return None
