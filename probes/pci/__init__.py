"""Probe of the PCIe tree."""
