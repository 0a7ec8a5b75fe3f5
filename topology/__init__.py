"""Pure functions that turn the probes' facts into a graph of GPUs, NICs and CPUs as NCCL sees it."""
