"""Limits that break RDMA and shared memory."""
