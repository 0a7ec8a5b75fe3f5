"""Probe of RDMA devices and ports."""
