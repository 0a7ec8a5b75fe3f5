"""Pure: turns what the probes read into a graph of GPUs, NICs and CPUs as NCCL sees them."""
