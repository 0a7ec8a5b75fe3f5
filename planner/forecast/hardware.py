"""What is assumed of a host until it is measured; GPUs are in hardware/gpus.toml."""

from __future__ import annotations

GIB = 1024.0**3
GIGA = 1e9

# What an unknown CPU core does in a float32 multiplication; wide, and said to be assumed. AVX2 at 2.5 GHz is
# 80 GFLOP/s per core at best, and small models reach a fraction.
ASSUMED_CPU_FLOPS_PER_CORE = 20e9
ASSUMED_CPU_MEMORY_BYTES_PER_SECOND = 10e9
# Loopback gloo of two local ranks moves of the order of 1 GB/s; assumed until measured.
ASSUMED_GLOO_BYTES_PER_SECOND = 1e9
