"""Benchmark collectives with real ranks."""
