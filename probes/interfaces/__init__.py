"""Probe of network interfaces and their roles."""
