"""Probe of NVIDIA GPUs (NVML)."""
