"""Measures collectives with real ranks."""
