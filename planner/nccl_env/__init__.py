"""The NCCL environment: a rule per variable."""
