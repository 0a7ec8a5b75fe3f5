"""Every metric family the agent may export: name, labels, kind, meaning, and the bound of every label.

Specification: https://prometheus.io/docs/practices/naming/ and https://prometheus.io/docs/instrumenting/writing_exporters/.
docs/metrics.md is made from this table (`python dashboards/generate.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from probes.registry import ALL

PREFIX = "topoflight_"

# Of the scraper: an exporter that sets them collides with target labels (Prometheus renames them to exported_*).
FORBIDDEN_LABELS = frozenset(
    {
        "job", "instance", "node", "pod", "namespace", "container", "cluster", "type", "region", "zone", "az", "dc",
        "owner", "stage", "service", "environment", "env",
    }
)  # fmt: skip

KEPT_SIZES = 4  # values of size_bytes: the largest ones; curves are in /measurements
KEPT_RANKS = 8  # stragglers, the latest first
KEPT_TRANSPORTS = 16
KEPT_COLLECTIVES = 16  # kinds of collective in a flight's step

# What a label holds, and how many values it can have: a number, a symbol, or "" where it follows from the others.
LABELS: dict[str, tuple[str, str]] = {
    "UUID": ("of the GPU", ""),
    "bound": ("low, mid or high of a forecast; soft or hard of a limit", "3"),
    "code": ("finding code", "C"),
    "collective": ("kind of collective", "16"),
    "device": ("network interface or RDMA device", "D"),
    "direction": ("send or receive", "2"),
    "fact": ("a probe, `bench` or `flight`", str(len(ALL) + 2)),
    "gdrdma": ("on, off, partial or none", ""),
    "gpu": ("index of the GPU", "G"),
    "hypervisor": ("name of the hypervisor", ""),
    "inter_node": ("transport between nodes", ""),
    "intra_node": ("transport within the node", ""),
    "kind": ("kind of device, interface, error or change", "6"),
    "link": ("NVLink of one GPU", "18"),
    "link_layer": ("InfiniBand or Ethernet", ""),
    "mode": ("IOMMU mode", ""),
    "model_name": ("model of the GPU", ""),
    "nearest": ("true where no NIC is nearer", ""),
    "netdev": ("interface of an RDMA port", ""),
    "network": ("network attachment of the pod", ""),
    "numa_node": ("NUMA node", "N"),
    "op": ("collective operation", "O"),
    "parent": ("interface below", ""),
    "path": ("NV18, PIX, PXB, PHB, NODE, SYS", ""),
    "pci_bus_id": ("PCI address", "D"),
    "peer_gpu": ("index of the other GPU", "G"),
    "peer_numa_node": ("the other NUMA node", "N"),
    "phase": ("first or last step", "2"),
    "port": ("port of an RDMA device", "P"),
    "probe": ("name of the probe", str(len(ALL))),
    "quantity": ("step_seconds or memory_bytes", "2"),
    "rank": ("rank of the last benchmark", "8"),
    "rdma_device": ("RDMA device of an interface", ""),
    "reason": ("what holds clocks down, or the API server's refusal", "10"),
    "role": ("role of the interface", ""),
    "scope": ("island, node, rail or cluster", "4"),
    "severity": ("info, unknown, warn or fail", "4"),
    "size_bytes": ("size as nccl-tests counts it, the largest", "4"),
    "status": ("of the gate, a check or a run", "8"),
    "subject": ("GPU, port, interface or link of a warning or failure", "D"),
    "transport": ("transport of a channel line", "16"),
    "version": ("version of the agent", ""),
}
SYMBOLS = {
    "G": "GPUs of the host",
    "D": "PCI devices, interfaces or RDMA devices of the host",
    "P": "ports of a device",
    "N": "NUMA nodes of the host",
    "O": "operations measured",
    "C": "finding codes that did not pass",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family: `name` is without the prefix."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: str = "gauge"  # "gauge", "counter", "info"
    source: str = "agent"  # or the probe it comes from

    @property
    def exposed(self) -> str:
        """The name a query uses."""
        return PREFIX + self.name

    @property
    def bound(self) -> tuple[str, ...]:
        """Factors of the most series that one host can have of it; () is one series."""
        keys = [label for label in self.labels if not (label == "pci_bus_id" and "gpu" in self.labels)]
        if self.kind == "info":  # one series per thing; what is said about the thing multiplies nothing
            keys = [label for label in keys if LABELS[label][1] in ("G", "D", "P")]
        if "code" in keys:  # a code has the severity of its case
            keys.remove("severity")
        return tuple(factor for label in keys if (factor := LABELS[label][1]))


def _agent(name: str, text: str, *labels: str, kind: str = "gauge") -> Family:
    return Family(name=name, help=text, labels=labels, kind=kind)


OWN: tuple[Family, ...] = (
    _agent("build_info", "Version of the agent.", "version", kind="info"),
    _agent("scan_timestamp_seconds", "Unix time of the last scan."),
    _agent("hosts", "Hosts that this agent shows: more than one where it serves recordings."),
    _agent("fact_timestamp_seconds", "Unix time at which a fact was read or measured.", "fact"),
    _agent("probe_success", "1 where the probe answered or found nothing to look at, 0 where it failed.", "probe"),
    _agent("probe_absent", "1 where the host has nothing for this probe to look at.", "probe"),
    _agent("probe_duration_seconds", "Duration of the probe's last run.", "probe"),
    _agent("findings", "Checks of the last scan that did not pass, by what they are about.", "code", "severity",
           "subject"),
    _agent("finding_since_seconds", "Unix time since which a finding of that code is there.", "code", "severity"),
    _agent("change_timestamp_seconds", "Unix time of the last driver, firmware, kernel or hardware change.", "kind"),
    _agent("checks", "Checks of the last scan by their outcome.", "status"),
    _agent("gate_status", "1 for the status the gate is in: pass, warn, unknown, fail.", "status"),
    # --- the cluster: of an agent that publishes, and of one that was asked for the cluster; as of the last scan
    _agent("publish_interval_seconds", "How often this node's record is written though nothing changed."),
    _agent("publish_attempts_total", "Attempts to write this node's record into the cluster.", kind="counter"),
    _agent("publish_failures_total", "Attempts that failed.", "reason", kind="counter"),
    _agent("publish_success_timestamp_seconds", "Unix time of the last write that succeeded."),
    _agent("watch_lists_total", "Times that all nodes' records were listed.", kind="counter"),
    _agent("watch_restarts_total", "Watches of the nodes' records that ended in an error.", "reason", kind="counter"),
    _agent("watch_heard_timestamp_seconds", "Unix time of the last list, event or bookmark of the watch."),
    # --- links; GPU pairs in both orders, so that a heat map has both halves
    _agent("gpu_link_info", "1 for the path between two GPUs.", "gpu", "peer_gpu", "path", kind="info"),
    _agent("gpu_link_distance", "Place of the path in NCCL's order, 0 nearest (LOC 0, NVL 1, PIX 4, SYS 9).",
           "gpu", "peer_gpu"),
    _agent("gpu_link_nvlinks", "NVLinks between two GPUs.", "gpu", "peer_gpu"),
    _agent("gpu_link_expected_bytes_per_second", "NCCL's planning bandwidth of the link, one direction.",
           "gpu", "peer_gpu"),
    _agent("gpu_nic_info", "1 for the path between GPU and NIC.", "gpu", "device", "path", "nearest", kind="info"),
    _agent("gpu_nic_distance", "Place of the path in NCCL's order, 0 nearest (PIX 4, PXB 5, PHB 8, SYS 9).",
           "gpu", "device"),
    _agent("gpu_nic_nearest_distance", "Place in NCCL's order of the path to the nearest usable NIC.", "gpu"),
    _agent("gdrdma_possible", "1 where modules and an ACTIVE port would allow GPUDirect RDMA."),
    _agent("expected_busbw_bytes_per_second", "Bus bandwidth derived from the links.", "op", "scope"),
    # --- the last benchmark
    _agent("bench_success", "1 where the last benchmark was complete and verified."),
    _agent("bench_duration_seconds", "Duration of the last benchmark."),
    _agent("bench_ranks", "Ranks of the last benchmark."),
    _agent("bench_algbw_bytes_per_second", "Algorithm bandwidth of the last benchmark.", "op", "size_bytes"),
    _agent("bench_busbw_bytes_per_second", "Bus bandwidth of the last benchmark.", "op", "size_bytes"),
    _agent("bench_expected_busbw_bytes_per_second", "Usual bus bandwidth of healthy links for that result.",
           "op", "size_bytes"),
    _agent("bench_least_busbw_bytes_per_second", "Least bus bandwidth of healthy links for that result, where it is "
           "judged.", "op", "size_bytes"),
    _agent("bench_spread_ratio", "Half width of the 95 % interval of the median over the median.", "op", "size_bytes"),
    _agent("bench_latency_seconds", "Latency (alpha) of the last benchmark.", "op"),
    _agent("bench_slow_ranks", "Ranks that the others wait for."),
    _agent("bench_rank_late_seconds", "Median time that a slow rank is late.", "rank"),
    _agent("gdrdma_channels_ratio", "Share of inter-node channels with GPUDirect RDMA in the last log.", "direction"),
    _agent("network_channels", "Inter-node channels counted in the last log.", "direction"),
    _agent("transport_channels", "Channel lines of the last log by transport.", "transport"),
    _agent("transport_info", "Transports proven by the last log.", "inter_node", "intra_node", "gdrdma", kind="info"),
    _agent("log_problems", "Problems the last log shows.", "code", "severity"),
    # --- the last flight
    _agent("flights", "Flights the agent remembers, by how they ended.", "status"),
    _agent("flight_success", "1 where the last flight ended complete."),
    _agent("flight_steps", "Steps of the last flight."),
    _agent("flight_step_seconds", "Median step time of the last flight."),
    _agent("flight_forecast_step_seconds", "Forecast of that step time.", "bound"),
    _agent("flight_memory_bytes", "Peak memory of the fullest rank of the last flight."),
    _agent("flight_forecast_memory_bytes", "Forecast of that peak.", "bound"),
    _agent("flight_within_forecast", "1 where the measured quantity lies inside the forecast.", "quantity"),
    _agent("flight_tokens_per_second", "Tokens per second of the last flight."),
    _agent("flight_mfu_ratio", "Model FLOPs utilisation of the last flight."),
    _agent("flight_loss", "Loss at the first and the last step of the last flight.", "phase"),
    _agent("flight_communication_ratio", "Share of the profiled steps spent in collectives."),
    _agent("flight_exposed_communication_ratio", "Share of the profiled steps that no computing hides."),
    _agent("flight_communication_seconds", "Time of the profiled steps by collective.", "collective"),
)  # fmt: skip

# Labels of the probes in the spelling of the exposition: promtool asks for snake_case, and peer_gpu is dcgm-exporter's.
SPELLED = {"modelName": "model_name", "peer": "peer_gpu"}

PROBES: tuple[Family, ...] = tuple(
    Family(
        name=metric.name,
        help=metric.help,
        labels=tuple(SPELLED.get(label, label) for label in metric.labels),
        kind=metric.kind,
        source=probe.name,
    )
    for probe in ALL
    for metric in probe.metrics
)
CATALOGUE: tuple[Family, ...] = (*OWN, *PROBES)
