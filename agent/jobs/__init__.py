"""Benchmarks and training runs: start, follow and store them."""
