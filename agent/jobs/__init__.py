"""Benchmarks and training runs: started, followed, kept."""
