"""Kubernetes: the client, what nodes publish, the gate over nodes."""
