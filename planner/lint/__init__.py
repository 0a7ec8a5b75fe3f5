"""Judges an environment that exists."""
