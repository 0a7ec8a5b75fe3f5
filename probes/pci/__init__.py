"""The PCIe tree."""
