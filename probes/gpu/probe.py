"""GPUs through NVML: links, health, and what each could do with its neighbours; what of it is exported.

Exported are links, the matrix and their limits; dcgm-exporter has the rest. The labels gpu, UUID and pci_bus_id are
dcgm-exporter's, in its spelling, so that both can be joined.

Specification: NVML API reference; the module is `pynvml` of nvidia-ml-py. Every call is optional: a GPU that does
not support one leaves None, a lost GPU is kept with its error and never hides the others.
"""

from __future__ import annotations

from collections.abc import Iterator

from probes.api import Metric, Probe, Sample
from probes.gpu.check import CODES, check
from probes.gpu.facts import Gpu, GpuFacts
from probes.gpu.health import unjudged
from probes.gpu.read import THROTTLE_REASONS, read
from probes.host.nvml import nvml_bus_id

_GPU = ("gpu", "UUID", "pci_bus_id")

METRICS = (
    Metric(name="gpu_info", help="1 for every GPU of the host.", labels=(*_GPU, "model_name"), kind="info"),
    Metric(name="gpu_up", help="0 where the driver has lost the GPU; none where it refuses to say.", labels=_GPU),
    Metric(name="gpu_nvlink_up", help="1 where the link has a partner.", labels=(*_GPU, "link")),
    Metric(name="gpu_nvlinks_active", help="Active NVLinks of the GPU.", labels=_GPU),
    Metric(
        name="gpu_nvlink_errors_total", help="Errors since driver load.", labels=(*_GPU, "link", "kind"), kind="counter"
    ),
    Metric(name="gpu_pcie_lanes", help="PCIe lanes in use.", labels=_GPU),
    Metric(name="gpu_pcie_lanes_max", help="PCIe lanes that GPU and slot can use.", labels=_GPU),
    Metric(name="gpu_pcie_generation", help="PCIe generation now; low on an idle GPU.", labels=_GPU),
    Metric(name="gpu_pcie_generation_max", help="PCIe generation that GPU and slot can use.", labels=_GPU),
    Metric(name="gpu_p2p_ok", help="1 where the driver allows P2P reads between two GPUs.", labels=("gpu", "peer_gpu")),
    Metric(name="gpu_fabric_ready", help="1 where the NVSwitch fabric has taken the GPU in.", labels=_GPU),
    Metric(name="gpu_throttling", help="1 while the reason holds the clocks down.", labels=(*_GPU, "reason")),
    Metric(name="gpu_temperature_slowdown_celsius", help="Temperature at which the GPU slows down.", labels=_GPU),
    Metric(name="gpu_power_limit_watts", help="Power limit in force.", labels=_GPU),
    Metric(name="gpu_power_limit_default_watts", help="Power limit of the board.", labels=_GPU),
    Metric(name="gpu_processes", help="Compute processes on the GPU.", labels=_GPU),
)


def samples(facts: GpuFacts) -> Iterator[Sample]:
    """Values that are known; an unknown one has no sample."""
    for gpu in facts.gpus:
        labels = (str(gpu.index), gpu.uuid or "", nvml_bus_id(gpu.bus_id))
        for name, value in _values(gpu):
            if value is not None:
                yield Sample(metric=name, value=float(value), labels=labels)
        yield Sample(metric="gpu_info", value=1.0, labels=(*labels, gpu.name or ""))
        yield from _links(gpu, labels)
        for reason in THROTTLE_REASONS.values() if gpu.throttle_reasons is not None else ():
            active = reason in (gpu.throttle_reasons or ())
            yield Sample(metric="gpu_throttling", value=float(active), labels=(*labels, reason))
    for pair in facts.pairs:
        if pair.p2p_read is not None:
            for one, other in ((pair.a, pair.b), (pair.b, pair.a)):
                yield Sample(metric="gpu_p2p_ok", value=float(pair.p2p_read == "ok"), labels=(str(one), str(other)))


def _values(gpu: Gpu) -> tuple[tuple[str, float | None], ...]:
    fabric = gpu.fabric_state not in (None, "not_supported")
    return (
        ("gpu_up", float(gpu.error is None) if gpu.error is None or gpu.broken else None),
        ("gpu_nvlinks_active", sum(link.active is True for link in gpu.nvlinks) if gpu.nvlinks_known else None),
        ("gpu_pcie_lanes", gpu.pcie_width),
        ("gpu_pcie_lanes_max", gpu.pcie_width_max),
        ("gpu_pcie_generation", gpu.pcie_generation),
        ("gpu_pcie_generation_max", gpu.pcie_generation_max),
        ("gpu_fabric_ready", float(gpu.fabric_state == "completed") if fabric else None),
        ("gpu_temperature_slowdown_celsius", gpu.temperature_slowdown_celsius),
        ("gpu_power_limit_watts", gpu.power_limit_watts),
        ("gpu_power_limit_default_watts", gpu.power_limit_default_watts),
        ("gpu_processes", None if gpu.processes is None else len(gpu.processes)),
    )


def _links(gpu: Gpu, labels: tuple[str, ...]) -> Iterator[Sample]:
    for link in gpu.nvlinks:
        if link.active is not None:
            yield Sample(metric="gpu_nvlink_up", value=float(link.active), labels=(*labels, str(link.link)))
        for kind, count in (link.errors or {}).items():
            yield Sample(metric="gpu_nvlink_errors_total", value=count, labels=(*labels, str(link.link), kind))


PROBE: Probe[GpuFacts] = Probe(
    name="gpu",
    facts=GpuFacts,
    read=read,
    check=check,
    codes=CODES,
    unjudged=unjudged,
    metrics=METRICS,
    samples=samples,
    # The first NVML call on a host without persistence mode initialises every GPU: about 1 s each, 16 GPUs at most. A
    # driver that takes 100 ms for an answer tells of 8 GPUs' health and of their links in the rest.
    timeout_seconds=45.0,
)
