"""RDMA devices and ports."""
