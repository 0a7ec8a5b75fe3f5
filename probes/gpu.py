"""GPUs through NVML: links, health, and what each could do with its neighbours.

Specification: NVML API reference; the module is `pynvml` of nvidia-ml-py. Every call is optional: a GPU that does
not support one leaves None, a lost GPU is kept with its error and never hides the others.
"""

from __future__ import annotations

from probes import gpu_check, gpu_read, gpu_samples
from probes.api import Probe
from probes.gpu_types import Gpu, GpuFacts, GpuPair, GpuProcess, NvLink

__all__ = ["PROBE", "Gpu", "GpuFacts", "GpuPair", "GpuProcess", "NvLink"]

PROBE: Probe[GpuFacts] = Probe(
    name="gpu",
    facts=GpuFacts,
    read=gpu_read.read,
    check=gpu_check.check,
    codes=gpu_check.CODES,
    metrics=gpu_samples.METRICS,
    samples=gpu_samples.samples,
    # The first NVML call on a host without persistence mode initialises every GPU: about 1 s each, 16 GPUs at most.
    timeout_seconds=30.0,
)
