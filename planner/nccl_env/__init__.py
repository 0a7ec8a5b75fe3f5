"""Recommended NCCL environment: one rule per variable."""
