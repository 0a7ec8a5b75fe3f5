"""Probe of limits that can break RDMA and shared memory."""
