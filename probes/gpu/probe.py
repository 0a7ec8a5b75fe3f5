"""GPUs through NVML: links, health, and what each could do with its neighbours.

Specification: NVML API reference; the module is `pynvml` of nvidia-ml-py. Every call is optional: a GPU that does
not support one leaves None, a lost GPU is kept with its error and never hides the others.
"""

from __future__ import annotations

from probes.api import Probe
from probes.gpu import check as gpu_check
from probes.gpu import health as gpu_health
from probes.gpu import read as gpu_read
from probes.gpu import samples as gpu_samples
from probes.gpu.types import Gpu, GpuFacts, GpuPair, GpuProcess, NvLink

__all__ = ["PROBE", "Gpu", "GpuFacts", "GpuPair", "GpuProcess", "NvLink"]

PROBE: Probe[GpuFacts] = Probe(
    name="gpu",
    facts=GpuFacts,
    read=gpu_read.read,
    check=gpu_check.check,
    codes=gpu_check.CODES,
    unjudged=gpu_health.unjudged,
    metrics=gpu_samples.METRICS,
    samples=gpu_samples.samples,
    # The first NVML call on a host without persistence mode initialises every GPU: about 1 s each, 16 GPUs at most. A
    # driver that takes 100 ms for an answer tells of 8 GPUs' health and of their links in the rest.
    timeout_seconds=45.0,
)
