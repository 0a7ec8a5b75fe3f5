"""Findings to a verdict: coverage, expectations, measured bars, baselines."""
