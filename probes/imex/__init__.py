"""Probe of IMEX, which shares GPU memory between the hosts of one NVLink domain."""
