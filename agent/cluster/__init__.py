"""Kubernetes: the client, what nodes publish, the admission controller."""
