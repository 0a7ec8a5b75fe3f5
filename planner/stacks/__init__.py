"""Training stacks, a file for each: what it can run, its terms of the forecast, and its configuration."""
