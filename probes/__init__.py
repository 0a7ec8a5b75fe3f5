"""Probes that read the facts of one host without changing anything."""
