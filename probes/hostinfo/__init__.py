"""Probe of the machine: CPU, NUMA, memory, kernel, virtualisation."""
