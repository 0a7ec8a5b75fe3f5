"""Kubernetes: the API client, the records published by nodes, and the gate for nodes."""
