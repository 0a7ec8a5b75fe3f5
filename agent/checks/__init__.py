"""Convert findings to a verdict: coverage, expectations, measured limits, baselines."""
