"""The preflight gate: from findings and measurements to a verdict and its exit code."""
